"""Pre-norm wiring without a norm before the mixer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.components.contracts import Cache, Step, Wiring
from zoo.components.registry import part
from zoo.components.wiring._residual import Residual


@part(Wiring, "pre_mlp", source="Warner et al. 2024 (ModernBERT), arXiv:2412.13663, section 2.1.1: the first layer")
@dataclass(frozen=True, kw_only=True)
class PreMLP(Residual):
    """x + mixer(x), then x + mlp(norm x): for a first layer whose input comes out of the embedding's norm.

    scale, layer_scale: constant and learned factors on what is added; see Residual.
    """

    norms = ("mlp_norm",)

    def run(self, layer: Any, x: Tensor, step: Step, cache: Cache) -> Tensor:
        x = x + self.scaled(layer, "mixer", layer.mixer(x, step, cache))
        return x + self.scaled(layer, "mlp", layer.mlp(layer.mlp_norm(x)))
