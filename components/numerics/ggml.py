"""Blocks of GGUF files: 32 weights, or 256 for the K-quants, with their scales beside them.

Shape legend: N outputs, K inputs, B blocks of a row. A row's blocks lie one after the other, each as its scales (float16, little
endian) and then its codes. The layouts are those of ggml-common.h; ``gguf.quants`` decodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

BLOCK, SUPER = 32, 256
SUB4, SUB6 = 32, 16  # weights of a Q4_K and of a Q6_K group
TOP4, LOW6, HIGH6 = 15, -32, 31  # codes of a Q4_K group, levels of a Q6_K group
TOP_SCALE4, TOP_SCALE6 = 63, 127  # the scales themselves are integers
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)  # of a group's range that are tried
CHUNK = 1 << 18  # weights searched at once
Tensors = TypeVar("Tensors", bound=tuple[Tensor, ...])

# ---- integers that are there already -----------------------------------------------------------------------------------------


def q4_0(levels: Tensor, scale: Tensor) -> Tensor:
    """level * scale: levels [N, K] int16 in -8..7, scale [N, B] float16 -> uint8 [N, 18 B]."""
    return _joined(_bytes(scale), _nibbles(levels + 8))


def q4_1(codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """code * scale + low: codes [N, K] in 0..15, scale and low [N, B] float16 -> uint8 [N, 20 B]."""
    return _joined(_bytes(scale), _bytes(low), _nibbles(codes))


def q5_0(levels: Tensor, scale: Tensor) -> Tensor:
    """level * scale: levels [N, K] int16 in -16..15, scale [N, B] float16 -> uint8 [N, 22 B]."""
    codes = (levels + 16).to(torch.int64)
    fifth = (codes.unflatten(-1, (-1, BLOCK)) >> 4) << torch.arange(BLOCK, device=codes.device)
    return _joined(_bytes(scale), fifth.sum(-1).to(torch.int64).view(torch.uint8).unflatten(-1, (-1, 8))[..., :4], _nibbles(codes & 15))


def q8_0(levels: Tensor, scale: Tensor) -> Tensor:
    """level * scale: levels [N, K] int16 in -128..127, scale [N, B] float16 -> uint8 [N, 34 B]."""
    return _joined(_bytes(scale), levels.to(torch.int8).view(torch.uint8).unflatten(-1, (-1, BLOCK)))


def mxfp4(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [N, K] of E2M1, scale [N, B] uint8 of E8M0 -> uint8 [N, 17 B]."""
    return _joined(scale[..., None], _nibbles(codes))


def _joined(*fields: Tensor) -> Tensor:
    """Fields [N, B, bytes] of blocks -> uint8 [N, B * bytes]."""
    return torch.cat(fields, -1).flatten(1)


def _bytes(scale: Tensor) -> Tensor:
    return scale.to(torch.float16).contiguous().view(torch.uint8).unflatten(-1, (-1, 2))


def _nibbles(codes: Tensor) -> Tensor:
    """[N, K] in 0..15 -> uint8 [N, B, 16]: the first 16 of a block in the low halves, the others in the high ones."""
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2, BLOCK // 2)).unbind(-2)
    return low | high << 4


# ---- K-quants: floats are rounded --------------------------------------------------------------------------------------------


def q4_k(weight: Tensor) -> Tensor:
    """d * s * code - m * t for groups of 32, with s and t of 6 bits and d and m (float16) for 256: [N, K] -> uint8 [N, 144 K / 256].

    Each group's range is searched for the least squared error, and scale and offset are then those of least squares for its codes.
    """
    return _by_rows(_q4_k, weight)


def q6_k(weight: Tensor) -> Tensor:
    """d * s * level for groups of 16, with s of 8 bits and d (float16) for 256: [N, K] -> uint8 [N, 210 K / 256]; as ``q4_k``."""
    return _by_rows(_q6_k, weight)


def _by_rows(encode: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    rows = max(1, CHUNK // weight.shape[1])
    return torch.cat([encode(part.float()) for part in weight.split(rows)])


def _q4_k(weight: Tensor) -> Tensor:
    groups = weight.unflatten(-1, (-1, SUPER // SUB4, SUB4))  # [N, B, 8, 32]
    scale, offset = _affine(groups)
    steps = [_step(t, TOP_SCALE4) for t in (scale, offset)]
    scales, offsets = (_quotient(t, step).clamp_(0, TOP_SCALE4) for t, step in zip((scale, offset), steps, strict=True))
    shift, size = (offsets * steps[1].float())[..., None], (scales * steps[0].float())[..., None]
    codes = _quotient(groups + shift, size).clamp_(0, TOP4).to(torch.uint8)
    low, high = codes.unflatten(2, (-1, 2)).unbind(3)  # 64 weights share 32 bytes
    return _joined(*map(_bytes, (steps[0].flatten(1), steps[1].flatten(1))), _six_bits(scales, offsets), (low | high << 4).flatten(2))


def _six_bits(scales: Tensor, offsets: Tensor) -> Tensor:
    """[N, B, 8] each in 0..63 -> [N, B, 12]: the first four of each whole, with the top bits of the others above them."""
    s, t = scales.to(torch.uint8), offsets.to(torch.uint8)
    first = [x[..., :4] | x[..., 4:] >> 4 << 6 for x in (s, t)]
    return torch.cat([*first, (s[..., 4:] & 15) | (t[..., 4:] & 15) << 4], -1)


def _q6_k(weight: Tensor) -> Tensor:
    groups = weight.unflatten(-1, (-1, SUPER // SUB6, SUB6))  # [N, B, 16, 16]
    scale = _linear(groups)
    step = _step(scale, TOP_SCALE6)
    scales = _quotient(scale, step).clamp_(-TOP_SCALE6 - 1, TOP_SCALE6)
    levels = _quotient(groups, (scales * step.float())[..., None]).clamp_(LOW6, HIGH6)
    codes = (levels - LOW6).to(torch.uint8).flatten(2).unflatten(-1, (2, 4, 32))  # halves of 128, runs of 32
    low, top = codes & 15, codes >> 4
    nibbles = low[..., :2, :] | low[..., 2:, :] << 4
    pairs = top[..., 0, :] | top[..., 1, :] << 2 | top[..., 2, :] << 4 | top[..., 3, :] << 6
    return _joined(nibbles.flatten(2), pairs.flatten(2), scales.to(torch.int8).view(torch.uint8), _bytes(step.flatten(1)))


def _step(scales: Tensor, top: int) -> Tensor:
    """What the integer scales of a block count, float16 [N, B, 1]."""
    return (scales.abs().amax(-1, keepdim=True) / top).to(torch.float16)


def _quotient(x: Tensor, step: Tensor) -> Tensor:
    """The nearest integers to x / step, 0 where the step is 0."""
    return (x / step.float()).round_().nan_to_num_(0.0, 0.0, 0.0)


def _affine(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset, both at least 0, of code * scale - offset, codes 0..15, for groups [..., 32]."""
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)

    def tried() -> Iterator[tuple[Tensor, Tensor]]:
        for share in SHARES:
            scale, offset = (high - low) * share / TOP4, -low * share
            codes = _quotient(groups + offset[..., None], scale[..., None]).clamp_(0, TOP4)
            yield scale, offset
            yield _least_squares(groups, codes)

    def value(scale: Tensor, offset: Tensor) -> Tensor:
        codes = _quotient(groups + offset[..., None], scale[..., None]).clamp_(0, TOP4)
        return codes * scale[..., None] - offset[..., None]

    return _best(groups, tried(), value)


def _least_squares(groups: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of the line through (code, weight), held to at least 0."""
    mean, centre = groups.mean(-1), codes.mean(-1)
    apart = codes - centre[..., None]
    scale = ((apart * groups).sum(-1) / apart.square().sum(-1).clamp_(min=1)).clamp_(min=0)
    return scale, (scale * centre - mean).clamp_(min=0)


def _linear(groups: Tensor) -> Tensor:
    """Scale of level * scale, levels -32..31, for groups [..., 16]; its sign gives the largest weight the longer side."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]

    def tried() -> Iterator[tuple[Tensor]]:
        for share in SHARES:
            scale = largest * share / LOW6
            levels = _quotient(groups, scale[..., None]).clamp_(LOW6, HIGH6)
            yield (scale,)
            yield ((levels * groups).sum(-1) / levels.square().sum(-1).clamp_(min=1),)

    return _best(groups, tried(), lambda scale: _quotient(groups, scale[..., None]).clamp_(LOW6, HIGH6) * scale[..., None])[0]


def _best(groups: Tensor, tried: Iterator[Tensors], value: Callable[..., Tensor]) -> Tensors:
    """Of the settings that are tried, each group's of least squared error. value: (setting) -> what the groups become."""
    found = next(tried)
    least = (value(*found) - groups).square().sum(-1)
    for setting in tried:
        error = (value(*setting) - groups).square().sum(-1)
        for held, new in zip(found, setting, strict=True):
            held.copy_(torch.where(error < least, new, held))
        least = torch.minimum(error, least)
    return found
