"""Mixer and MLP side by side on one norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.components.contracts import Cache, Step, Wiring
from zoo.components.registry import part
from zoo.components.wiring._residual import Residual


@part(Wiring, "parallel", source="Wang & Komatsuzaki 2021 (GPT-J); Falcon 7B, Phi, Cohere")
@dataclass(frozen=True, kw_only=True)
class Parallel(Residual):
    """x + mixer(norm x) + mlp(norm x) with one norm for both.

    scale, layer_scale: constant and learned factors on what is added; see Residual.
    """

    norms = ("mixer_norm",)

    def run(self, layer: Any, x: Tensor, step: Step, cache: Cache) -> Tensor:
        y = layer.mixer_norm(x)
        return x + (self.scaled(layer, "mixer", layer.mixer(y, step, cache)) + self.scaled(layer, "mlp", layer.mlp(y)))
