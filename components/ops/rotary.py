"""Rotation of channel pairs, and the frequencies that all scalings start from."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["half", "interleaved"]


def frequencies(base: float, width: int) -> Tensor:
    """base^(-2i/width) for i < width/2, fp32 [width/2]; the order of operations is that of the published implementations."""
    return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width))


def correction(rotations: float, base: float, width: int, context: int) -> float:
    """The (fractional) channel pair that turns ``rotations`` times within ``context`` positions (YaRN, arXiv:2309.00071, eq. 17)."""
    return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))


def tables(angle: Tensor, layout: Layout, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """angle [..., width/2] -> cos and signed sin [..., width]: a pair (a, b) is to become (a cos - b sin, b cos + a sin)."""
    cos, sin = torch.cos(angle) * factor, torch.sin(angle) * factor
    if layout == "half":
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """x [..., D] with its leading channels, as many as the tables have, turned; the rest is left alone."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return torch.addcmul(x * cos, partner(x, layout), sin)
    head, rest = x.split([width, x.shape[-1] - width], -1)
    return torch.cat([torch.addcmul(head * cos, partner(head, layout), sin), rest], -1)


def partner(x: Tensor, layout: Layout) -> Tensor:
    """For each channel, the other one of its pair."""
    if layout == "half":
        return x.roll(x.shape[-1] // 2, -1)
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def reference(x: Tensor, angle: Tensor, layout: Layout) -> Tensor:
    """x [..., D], angle [..., D/2]: each pair as a complex number, multiplied by e^(i angle)."""
    pairs = x.unflatten(-1, (2, -1)).mT if layout == "half" else x.unflatten(-1, (-1, 2))
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    return (turned.mT if layout == "half" else turned).flatten(-2)
