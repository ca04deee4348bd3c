"""Integers of few bits: evenly spaced grids, and dense packing into 32-bit words.

A weight [N, K] is cut into groups along K, one row of [N, G] scales and zeros for G = K / group size groups. Codes and zeros are
unsigned, 0 .. 2**bits - 1, and stand for ``(code - zero) * scale``; a symmetric grid has the fixed zero 2**(bits - 1). This is the
arithmetic and the storage of compressed-tensors' ``pack-quantized``, whose signed codes are ours less 2**(bits - 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

NORM = 2.4  # of the search for a range, with shares of 100 % down to 21 % of the full one: GPTQ's published choice
COARSE = tuple(-step / 20 for step in range(16))  # GPTQ tries every per cent; twenty tries find the same to a per cent
FINE = (-0.02, -0.01, 0.01, 0.02)
CHUNK = 1 << 16  # weights searched at once: what one core's second-level cache holds with its temporaries


@dataclass(frozen=True)
class Grid:
    """What a weight is rounded to. group_size: weights along the input that share a scale, None for the whole row."""

    bits: int
    group_size: int | None
    symmetric: bool
    scale_dtype: torch.dtype

    @property
    def top(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        """The zero of a symmetric grid."""
        return 2 ** (self.bits - 1)

    def groups(self, inputs: int) -> int:
        return inputs // self.group_size if self.group_size else 1


def fit(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The grid that spans each group's range.

    weight [N, K] -> scale [N, G] in the grid's dtype, zero [N, G] uint8. The scale is rounded to its dtype before the zero is
    computed, so that codes made with it agree with what is stored.
    """
    low, high = _range(weight, grid)
    return _spanning(low, high, grid)


def fit_error(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The grid of least rounding error among shrunken ranges (GPTQ's ``mse`` option): sum of |error| ** 2.4 over each group.

    Shapes as in ``fit``.
    """
    rows = max(1, CHUNK // weight.shape[1])
    found = [_search(part, grid) for part in weight.split(rows)]
    return torch.cat([scale for scale, _ in found]), torch.cat([zero for _, zero in found])


def quantize(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The nearest codes: weight [N, K], scale and zero [N, G] -> uint8 [N, K]."""
    grouped = weight.unflatten(-1, (scale.shape[-1], -1))
    codes = grouped.div(scale[..., None].to(weight.dtype)).round_().add_(zero[..., None]).clamp_(0, 2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | int, dtype: torch.dtype) -> Tensor:
    """(code - zero) * scale: codes [N, K], scale [N, G], zero [N, G] or one for all -> [N, K] in ``dtype``.

    Exact but for the last rounding to ``dtype``: code - zero has at most 9 bits.
    """
    exact = torch.promote_types(scale.dtype, dtype)
    weight = codes.to(exact).unflatten(-1, (scale.shape[-1], -1))
    weight.sub_(zero[..., None] if isinstance(zero, Tensor) else zero).mul_(scale[..., None])
    return weight.flatten(-2).to(dtype)


def packed_size(count: int, bits: int) -> int:
    """Words that ``count`` codes take."""
    return -(-count * bits // 32)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Dense packing along the last dim, first code in the lowest bits: [..., K] uint8 -> [..., ceil(K * bits / 32)] int32.

    Codes may straddle two words (3, 5, 6 and 7 bits). Unused bits are 0.
    """
    octets = F.pad(codes, (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8)).to(torch.int64)
    joined = (octets << _shifts(bits, codes.device)).sum(-1, keepdim=True)  # eight codes fill exactly ``bits`` bytes
    stream = joined.view(torch.uint8)[..., :bits].flatten(-2)
    size = 4 * packed_size(codes.shape[-1], bits)
    cut = F.pad(stream, (0, size - stream.shape[-1])).flatten()  # one row that was cut keeps a stride that cannot be viewed as words
    return cut.view(torch.int32).view(*codes.shape[:-1], size // 4)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``pack``: [..., ceil(count * bits / 32)] int32 -> [..., count] uint8."""
    stream = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stream[..., :count]
    octets = F.pad(stream, (0, -stream.shape[-1] % bits)).unflatten(-1, (-1, bits))
    codes = _by_table(octets, bits) if bits <= 4 else _by_shift(octets, bits)
    return codes[..., :count]


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """``pack`` along the first dim: [N, G] -> [ceil(N * bits / 32), G]. Zeros are stored like this."""
    return pack(codes.t(), bits).t().contiguous()


def unpack_rows(words: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``pack_rows``: -> [count, G]."""
    return unpack(words.t(), bits, count).t().contiguous()


# ---- fitting -----------------------------------------------------------------------------------------------------------------


def _range(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Least and greatest weight of each group, [N, G]; the range includes 0 and is even about it for a symmetric grid."""
    low, high = weight.unflatten(-1, (grid.groups(weight.shape[-1]), -1)).aminmax(dim=-1)
    if grid.symmetric:
        high = torch.maximum(-low, high)
        return -high, high
    return low.clamp(max=0), high.clamp(min=0)


def _spanning(low: Tensor, high: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    tiny = torch.finfo(grid.scale_dtype).tiny  # a group of zeros keeps a scale that can be divided by
    scale = ((high - low) / grid.top).to(grid.scale_dtype).clamp_(min=tiny)
    if grid.symmetric:
        return scale, torch.full_like(scale, grid.middle, dtype=torch.uint8)
    return scale, (-low / scale.to(low.dtype)).round_().clamp_(0, grid.top).to(torch.uint8)


def _search(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    low, high = _range(weight, grid)
    share, least = torch.ones_like(low), torch.full_like(low, torch.inf)
    for offsets in (COARSE, FINE):
        centre = share
        for offset in offsets:
            tried = centre + offset
            error = _error(weight, *_spanning(low * tried, high * tried, grid), grid.bits)
            share = torch.where(error < least, tried, share)
            least = torch.minimum(error, least)
    return _spanning(low * share, high * share, grid)


def _error(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """[N, G]: the sum of |rounding error| ** 2.4."""
    grouped = weight.unflatten(-1, (scale.shape[-1], -1))
    step, shift = scale.to(weight.dtype)[..., None], zero.to(weight.dtype)[..., None]
    levels = (grouped / step).round_().clamp_(-shift, 2**bits - 1 - shift)
    return levels.mul_(step).sub_(grouped).abs_().pow_(NORM).sum(-1)


# ---- packing -----------------------------------------------------------------------------------------------------------------


@cache
def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8 * bits, bits, device=device)


@cache
def _quartets(bits: int, device: torch.device) -> Tensor:
    """[2 ** (4 * bits)] int32: the four codes, a byte each, that a field of 4 * bits bits holds."""
    fields = torch.arange(2 ** (4 * bits), device=device)[:, None]
    codes = (fields >> _shifts(bits, device)[:4]) & (2**bits - 1)
    return codes.to(torch.uint8).view(torch.int32).flatten()


def _by_table(octets: Tensor, bits: int) -> Tensor:
    """[..., n, bits] bytes -> [..., 8 n] codes by looking up four at a time: several times faster than a shift for each code."""
    fields = _fields(octets, bits)
    return _quartets(bits, octets.device).index_select(0, fields.flatten()).view(torch.uint8).view(*octets.shape[:-2], -1)


def _fields(octets: Tensor, bits: int) -> Tensor:
    """Two fields of 4 * bits bits from each run of ``bits`` bytes, int32."""
    if bits == 2:
        return octets.to(torch.int32)
    if bits == 4:
        return octets.view(torch.int16).to(torch.int32) & 0xFFFF
    low, middle, high = (byte.to(torch.int32) for byte in octets.unbind(-1))
    return torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), -1)


def _by_shift(octets: Tensor, bits: int) -> Tensor:
    fields = F.pad(octets, (0, 8 - bits)).view(torch.int64)
    codes = (fields >> _shifts(bits, octets.device)) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)
