"""SmoothQuant: move the outliers of activations into weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from zoo.components.registry import part
from zoo.quantize.contracts import Channels, ChannelScaling, Transform

LEAST = 1e-5  # of a scale


@part(Transform, "smoothquant", source="Xiao et al. 2022, arXiv:2211.10438, equation 4")
@dataclass(frozen=True, kw_only=True)
class SmoothQuant(ChannelScaling):
    """Channels that a norm puts out are divided by max|X|^alpha / max|W|^(1 - alpha), what reads them is multiplied by it.

    alpha: 0.5 suits OPT, 0.8 Mistral and Mixtral, 0.85 Llama; at 0 only weights are evened out, at 1 only activations. sources: whose
    outputs are divided; the paper's are norms, ``value`` (read by the output projection) and ``up`` (read by ``down``) can be too.
    """

    sources: tuple[Literal["norm", "value", "up"], ...] = ("norm",)  # pyright: ignore[reportIncompatibleVariableOverride] (here a setting)
    alpha: float = 0.5

    def problems(self) -> Iterator[tuple[str, str]]:
        if not 0 <= self.alpha <= 1:
            yield "alpha", f"must lie in 0..1, got {self.alpha}"
        if not self.sources:
            yield "sources", "name at least one of norm, value, up"

    def scale(self, channels: Channels) -> tuple[Tensor, dict[str, Any]]:
        weight = torch.stack([w.abs().amax(0) for w in channels.weights]).amax(0)
        scale = (channels.largest.pow(self.alpha) / weight.clamp(min=LEAST).pow(1 - self.alpha)).clamp(min=LEAST)
        scale = torch.where((channels.largest > 0) & (weight > 0), scale, 1)  # a channel without signal or reader has no outlier
        return scale, {"alpha": self.alpha}
