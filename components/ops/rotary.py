"""Rotary frequencies, the common ground of all scalings."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def frequencies(base: float, width: int) -> Tensor:
    """base^(-2i/width) for i < width/2, fp32 [width/2]; the order of operations is that of the published implementations."""
    return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width))


def correction(rotations: float, base: float, width: int, context: int) -> float:
    """The (fractional) channel pair that turns ``rotations`` times within ``context`` positions (YaRN, arXiv:2309.00071, eq. 17)."""
    return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))
