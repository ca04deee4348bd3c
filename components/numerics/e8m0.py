"""E8M0: powers of two from 2^-127 to 2^127 as scales (OCP Microscaling Formats 1.0, section 5.4.1). A code u is 2^(u - 127), 255 NaN."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zoo.components.numerics.floats import Element

Rule = Literal["floor", "round", "ceil"]
BIAS, TOP, NAN = 127, 254, 255
# "round" lets a largest magnitude of at least this, relative to its own power of two, have the next power. compressed-tensors defines it
# for E2M1, E2M3 and E4M3; E3M2 and E5M2 follow the first two: what would be rounded past a full mantissa
CARRY = {"e2m1": 1.75, "e2m3": 1.9375, "e3m2": 1.875, "e4m3": 1.75, "e5m2": 1.875}


def encode(largest: Tensor, element: Element, rule: Rule = "round") -> Tensor:
    """The scales for blocks with these largest magnitudes, uint8 of the same shape.

    rule: "floor" is that of OCP (section 6.3: the largest magnitude's power of two over the element's; what lies above the largest
    number saturates); "round" is that of compressed-tensors; "ceil" the least scale with which nothing saturates, as ModelOpt
    takes. A block of zeros has the least scale, one with NaN the code of NaN.
    """
    mantissa, exponent = torch.frexp(largest.float())  # the mantissa lies in [0.5, 1)
    carried = _carried(2 * mantissa, element, rule)
    codes = (exponent - 1 - element.top_exponent + carried + BIAS).clamp_(0, TOP)
    codes = codes.masked_fill_(largest == 0, 0).masked_fill_(largest.isinf(), TOP)
    return codes.masked_fill_(largest.isnan(), NAN).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """float32 of the same shape."""
    return codes.view(torch.float8_e8m0fnu).float()


def _carried(mantissa: Tensor, element: Element, rule: Rule) -> Tensor:
    """1 where the mantissa, in [1, 2), asks for the next power of two."""
    if rule == "floor":
        return torch.zeros_like(mantissa, dtype=torch.int32)
    if rule == "ceil":
        return (mantissa > element.largest / 2**element.top_exponent).int()
    return (mantissa >= CARRY[element.name]).int()
