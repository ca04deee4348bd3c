"""Codebooks of 16 numbers with a scale for each run of weights, as bitsandbytes has them: NF4 and its own FP4, which is not OCP's E2M1.

A weight is taken row after row as one run of n numbers and cut into blocks, the last of which may be short. Two codes share a byte, the
first in its high half. A number is ``code book [code] * absmax [block]``. The scales may be coded in their turn (double quantization):
less their mean, in blocks of 256, by a codebook of 256 numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Codebook = Literal["nf4", "fp4"]
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip
FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # over 12, by code; codes from 8 are their negatives
NESTED = 256  # scales that share a scale
LEAST = 1e-38  # a block of zeros is divided by this


@cache
def codebook(name: Codebook, device: torch.device) -> Tensor:
    """[16] float32, by code. Dettmers et al. 2023, arXiv:2305.14314, appendix E; for fp4 bitsandbytes, ``get_4bit_type``."""
    numbers = torch.tensor(NF4 if name == "nf4" else (*FP4, *(-n for n in FP4)), device=device)
    return numbers if name == "nf4" else numbers / 12


@cache
def dynamic(device: torch.device) -> Tensor:
    """[256] float32, ascending: the dynamic map of Dettmers 2015, arXiv:1511.04561, section 2.1, as bitsandbytes builds it.

    Seven decades up to 1; of each, the middles of 2^0 .. 2^6 equal parts between a tenth of it and all, with both signs; 0 and 1.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        middles = 10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        numbers += middles.tolist() + (-middles).tolist()
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


def blocks(count: int, size: int) -> int:
    """Blocks that ``count`` numbers take."""
    return -(-count // size)


def encode(weight: Tensor, name: Codebook, size: int) -> tuple[Tensor, Tensor]:
    """Nearest codes, two a byte [ceil(n / 2)] uint8, and the blocks' largest magnitudes [blocks] float32; of halves the lower number.

    The same bits as bitsandbytes' ``quantize_4bit`` on the CPU.
    """
    numbers = codebook(name, weight.device)
    order = numbers.argsort(stable=True)
    bounds = (numbers[order[:-1]] + numbers[order[1:]]) / 2
    scaled, absmax = _scaled(weight, size)
    codes = order[torch.bucketize(scaled, bounds)].to(torch.uint8)
    pairs = F.pad(codes, (0, len(codes) % 2), value=_zero(name)).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1], absmax


def decode(packed: Tensor, absmax: Tensor, name: Codebook, size: int, count: int) -> Tensor:
    """The inverse of ``encode``: float32 [count]."""
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[:count]
    return _times(codebook(name, packed.device)[codes.int()], absmax, size)


def encode_scales(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [blocks] uint8, their scales [ceil(blocks / 256)] float32, and what was subtracted before [1] float32.

    The nearest codes. bitsandbytes on the CPU searches with a table and takes the other neighbour of a few halves, one in 600.
    """
    offset = absmax.mean()
    numbers = dynamic(absmax.device)
    scaled, scales = _scaled(absmax - offset, NESTED)
    codes = torch.bucketize(scaled, (numbers[:-1] + numbers[1:]) / 2)
    return codes.to(torch.uint8), scales, offset.reshape(1)


def decode_scales(codes: Tensor, scales: Tensor, offset: Tensor) -> Tensor:
    """The inverse of ``encode_scales``: float32 [blocks]."""
    return _times(dynamic(codes.device)[codes.int()], scales, NESTED) + offset


def _scaled(numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Numbers of each block over its largest magnitude, [n], and that magnitude, [blocks].

    Whole blocks are multiplied by its reciprocal, the short one is divided: so does bitsandbytes, and the last bits depend on it.
    """
    flat = numbers.flatten().float()
    whole = len(flat) - len(flat) % size
    tail = flat[whole:]
    grouped = flat[:whole].view(-1, size)
    absmax = grouped.abs().amax(-1)
    scaled = (grouped * (1 / absmax.clamp(min=LEAST))[:, None]).clamp_(-1, 1).flatten()
    if not len(tail):
        return scaled, absmax
    last = tail.abs().max().clamp(min=LEAST)
    return torch.cat((scaled, (tail / last).clamp_(-1, 1))), torch.cat((absmax, last[None]))


def _times(numbers: Tensor, scales: Tensor, size: int) -> Tensor:
    """numbers [n] times the scales [blocks] of their blocks."""
    return (F.pad(numbers, (0, -len(numbers) % size)).view(-1, size) * scales[:, None]).flatten()[: len(numbers)]


def _zero(name: Codebook) -> int:
    return 7 if name == "nf4" else 0
