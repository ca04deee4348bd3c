"""Floating-point numbers of 4, 6 and 8 bits: rounding, codes, and their dense packing into bytes.

E2M1, E2M3, E3M2 and the 8-bit ones are the element formats of OCP Microscaling Formats 1.0 (2023), section 5.3; E4M3 and E5M2 are those
of Micikevicius et al. 2022, arXiv:2209.05433. A code is sign, exponent and mantissa from the highest bit down. What is too large
saturates, infinity too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from zoo.components.numerics import integer

ElementName = Literal["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"]
MANTISSA, BIAS = 23, 127  # of float32


@dataclass(frozen=True)
class Element:
    """A number format. largest: its greatest finite number."""

    name: ElementName
    exponent_bits: int
    mantissa_bits: int
    largest: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def least_exponent(self) -> int:
        """Of the numbers with a full mantissa; below it they are evenly spaced down to 0."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def top_exponent(self) -> int:
        """Of the largest number."""
        return math.floor(math.log2(self.largest))

    @property
    def dtype(self) -> torch.dtype | None:
        """torch's dtype of these numbers, which has codes for NaN; None where it has none."""
        return {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.get(self.name)


ELEMENTS: dict[ElementName, Element] = {
    "e2m1": Element("e2m1", 2, 1, 6.0),
    "e2m3": Element("e2m3", 2, 3, 7.5),
    "e3m2": Element("e3m2", 3, 2, 28.0),
    "e4m3": Element("e4m3", 4, 3, 448.0),
    "e5m2": Element("e5m2", 5, 2, 57344.0),
}


def rounded(x: Tensor, element: Element) -> Tensor:
    """The nearest numbers, ties to even, as float32 of the same shape; NaN stays NaN."""
    size = x.float().abs().clamp_(max=element.largest)
    exponent = (size.view(torch.int32) >> MANTISSA).sub_(BIAS).clamp_(min=element.least_exponent)
    step = (exponent.sub_(element.mantissa_bits - BIAS) << MANTISSA).view(torch.float32)  # 2 ** (exponent - mantissa bits)
    return size.div_(step).round_().mul_(step).copysign_(x)


def encode(x: Tensor, element: Element) -> Tensor:
    """Codes of the nearest numbers, uint8 of the same shape. NaN, which 4 and 6 bits do not have, becomes their largest number."""
    if element.dtype is not None:
        return x.float().clamp(-element.largest, element.largest).to(element.dtype).view(torch.uint8)
    near = rounded(x, element)
    codes = torch.searchsorted(_sizes(element, x.device), near.abs().nan_to_num(element.largest), out_int32=True)
    return codes.add_(near.signbit().int() << (element.bits - 1)).to(torch.uint8)


def decode(codes: Tensor, element: Element) -> Tensor:
    """The numbers of codes, float32 of the same shape."""
    if element.dtype is not None:
        return codes.view(element.dtype).float()
    return _numbers(element, codes.device)[codes.int()]


def packed_size(count: int, element: Element) -> int:
    """Bytes that ``count`` codes take."""
    return -(-count * element.bits // 8)


def pack(codes: Tensor, element: Element) -> Tensor:
    """Dense packing along the last dim, first code in the lowest bits: [..., K] uint8 -> [..., ceil(K * bits / 8)] uint8."""
    if element.bits == 8:
        return codes
    return integer.pack(codes, element.bits).view(torch.uint8)[..., : packed_size(codes.shape[-1], element)].contiguous()


def unpack(packed: Tensor, element: Element, count: int) -> Tensor:
    """The inverse of ``pack``: -> [..., count] uint8."""
    if element.bits == 8:
        return packed
    words = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % 4)).view(torch.int32)
    return integer.unpack(words, element.bits, count)


def numbers(packed: Tensor, element: Element, count: int) -> Tensor:
    """The numbers of packed codes, float32 [..., count]: ``decode(unpack(...))``, those of 4 and 6 bits two at a time."""
    if element.bits == 8:
        return decode(packed, element)
    fields = packed if element.bits == 4 else _twelve_bits(packed)
    pairs = _pairs(element, packed.device).index_select(0, fields.flatten().int())
    return pairs.view(*packed.shape[:-1], -1)[..., :count]


def _twelve_bits(packed: Tensor) -> Tensor:
    """Two fields of 12 bits from each run of three bytes, int32."""
    short = -packed.shape[-1] % 3
    low, middle, high = torch.nn.functional.pad(packed, (0, short)).unflatten(-1, (-1, 3)).int().unbind(-1)
    return torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), -1)


@cache
def _sizes(element: Element, device: torch.device) -> Tensor:
    """The numbers from 0 up, in the order of their codes."""
    steps = 2**element.mantissa_bits
    fields = [divmod(code, steps) for code in range(2 ** (element.bits - 1))]
    sizes = [math.ldexp(m + steps * (e > 0), max(e, 1) - 1 + element.least_exponent - element.mantissa_bits) for e, m in fields]
    return torch.tensor(sizes, device=device)


@cache
def _numbers(element: Element, device: torch.device) -> Tensor:
    """The number of every code."""
    sizes = _sizes(element, device)
    return torch.cat((sizes, -sizes))


@cache
def _pairs(element: Element, device: torch.device) -> Tensor:
    """[2 ** (2 * bits), 2]: the numbers of two codes that lie side by side."""
    fields = torch.arange(4**element.bits, device=device)
    return _numbers(element, device)[torch.stack((fields & 2**element.bits - 1, fields >> element.bits), -1)]
