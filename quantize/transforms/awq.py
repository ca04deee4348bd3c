"""AWQ's scales: weights that meet large activations are made larger before they are rounded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.components.registry import part
from zoo.quantize.contracts import Channels, ChannelScaling, Transform

STEPS = 20  # exponents tried: 0, 1/20, .. 19/20
LEAST = 1e-4  # of a scale, and beside weights in a denominator


@part(Transform, "awq", source="Lin et al. 2023, arXiv:2306.00978, section 3.2; weights in the scale: AutoAWQ")
@dataclass(frozen=True, kw_only=True)
class AWQScaling(ChannelScaling):
    """Scales mean|X|^a / mean|W|^(1 - a), the exponent being the one of 20 after which the parent module's output is off least.

    |W| is taken relative to the largest of its group. Channels stay as they are where no exponent improves on that.
    """

    measured = True

    def scale(self, channels: Channels) -> tuple[Tensor, dict[str, Any]] | None:
        weight = torch.cat([relative(w, channels.group_size) for w in channels.weights]).mean(0)
        before = channels.error(torch.ones_like(weight))
        best: tuple[float, float, Tensor] | None = None
        for exponent in (step / STEPS for step in range(STEPS)):
            scale = candidate(channels.mean, weight, exponent)
            error = channels.error(scale)
            if math.isfinite(error) and error < (best[0] if best else before):
                best = error, exponent, scale
        return best and (best[2], {"exponent": best[1], "error": best[0], "error_before": before})


def relative(weight: Tensor, group_size: int | None) -> Tensor:
    """|weight| [outputs, channels] over the largest of its group."""
    size = weight.abs().unflatten(1, (-1, group_size or weight.shape[1]))
    return (size / (size.amax(-1, keepdim=True) + 1e-6)).flatten(1)


def candidate(activation: Tensor, weight: Tensor, exponent: float) -> Tensor:
    """The scale of an exponent, its smallest and largest value about 1 on a logarithmic scale; all [channels]."""
    scale = (activation.pow(exponent) / (weight.pow(1 - exponent) + LEAST)).clamp(min=LEAST)
    return scale / (scale.max() * scale.min()).sqrt()
