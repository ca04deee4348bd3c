"""Mixer and MLP side by side, each with a norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.components.contracts import Cache, Step, Wiring
from zoo.components.registry import part
from zoo.components.wiring._residual import Residual


@part(Wiring, "parallel_norms", source="Black et al. 2022 (GPT-NeoX), arXiv:2204.06745, section 2.1; Falcon 40B")
@dataclass(frozen=True, kw_only=True)
class ParallelNorms(Residual):
    """x + mixer(norm x) + mlp(norm x) with a norm for each.

    scale, layer_scale: constant and learned factors on what is added; see Residual.
    """

    norms = ("mixer_norm", "mlp_norm")

    def run(self, layer: Any, x: Tensor, step: Step, cache: Cache) -> Tensor:
        mixed = self.scaled(layer, "mixer", layer.mixer(layer.mixer_norm(x), step, cache))
        return x + (mixed + self.scaled(layer, "mlp", layer.mlp(layer.mlp_norm(x))))
