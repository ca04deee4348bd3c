"""Roundings of the formats that SageAttention computes in. Values stay floats; gradients pass straight through.

Shapes: x [..., N, D], N tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0


class Coded(NamedTuple):
    """x is about codes [..., N, D] * scale [..., N, 1]; the codes are whole numbers."""

    codes: Tensor
    scale: Tensor


def straight(rounded: Tensor, x: Tensor) -> Tensor:
    """``rounded`` with the gradient of x, exactly (x - x is 0)."""
    return rounded.detach() + (x - x.detach())


def integers(x: Tensor, top: int, layout: tuple[int, ...], own: tuple[int, ...] = ()) -> Coded:
    """Symmetric integers -top .. top, ties away from zero. A run of tokens is laid out as ``layout``; tokens that agree in the
    layout dims ``own`` share a scale, the largest magnitude / top.
    """
    count, run = x.shape[-2], math.prod(layout)
    tiles = F.pad(x, (0, 0, 0, -count % run)).unflatten(-2, (-1, *layout))
    shared = [d - len(layout) - 1 for d in range(len(layout)) if d not in own]
    scale = tiles.detach().abs().amax([*shared, -1], keepdim=True) / top
    scale = scale.masked_fill(scale == 0, 1)
    ratio = tiles / scale
    codes = straight(torch.trunc(ratio + 0.5 * ratio.sign()), ratio)
    flat = (-len(layout) - 2, -2)
    tokens = [t.flatten(*flat)[..., :count, :] for t in (codes, scale.expand(*tiles.shape[:-1], 1))]
    return Coded(tokens[0], tokens[1])


def logits(q: Coded, k: Coded) -> Tensor:
    """q k^T: an exact integer product, then both scales."""
    return (q.codes @ k.codes.mT) * q.scale * k.scale.mT


def e4m3(x: Tensor) -> Tensor:
    """FP8 with 4 exponent and 3 mantissa bits, to nearest even, saturating at 448."""
    return straight(x.detach().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype), x)


def e2m1(x: Tensor) -> Tensor:
    """FP4 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), to nearest even, saturating at 6."""
    size = x.detach().abs().clamp(max=E2M1_MAX)
    step = 0.5 * 2.0 ** ((size >= 2).to(x.dtype) + (size >= 4))
    return straight((size / step).round() * step * x.detach().sign(), x)


def fp16(x: Tensor) -> Tensor:
    return straight(x.detach().half().to(x.dtype), x)


def fp22(x: Tensor) -> Tensor:
    """The accumulator behind FP8 tensor-core products on Ada and Hopper: fp32 cut to 13 mantissa bits (arXiv:2411.10958, 3.4)."""
    cut = (x.detach().float().view(torch.int32) & ~0x3FF).view(torch.float32)
    return straight(cut.to(x.dtype), x)


def microscaled(x: Tensor, group: int = 16) -> Tensor:
    """NVFP4 without a tensor scale: groups of the last dim share an E4M3 scale, amax / 6, and hold E2M1 codes of x / scale."""
    width = x.shape[-1]
    tiles = F.pad(x, (0, -width % group)).unflatten(-1, (-1, group))
    scale = e4m3(tiles.detach().abs().amax(-1, keepdim=True) / E2M1_MAX)
    return (e2m1(tiles / scale.masked_fill(scale == 0, 1)) * scale).flatten(-2)[..., :width]


def microscaled_weights(p: Tensor, group: int = 16) -> Tensor:
    """As ``microscaled`` for softmax weights, whose codes the kernel takes before it rounds the scale to E4M3."""
    width = p.shape[-1]
    tiles = F.pad(p, (0, -width % group)).unflatten(-1, (-1, group))
    scale = tiles.detach().amax(-1, keepdim=True) / E2M1_MAX
    return (e2m1(tiles / scale.masked_fill(scale == 0, 1)) * e4m3(scale)).flatten(-2)[..., :width]
