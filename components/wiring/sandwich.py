"""Norms before and after each branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.components.contracts import Cache, Step, Wiring
from zoo.components.registry import part
from zoo.components.wiring._residual import Residual


@part(Wiring, "sandwich", source="Ding et al. 2021 (CogView), arXiv:2105.13290, section 2.4; Gemma 2, arXiv:2408.00118")
@dataclass(frozen=True, kw_only=True)
class Sandwich(Residual):
    """x + norm(mixer(norm x)), then x + norm(mlp(norm x)), each with norms of its own.

    scale, layer_scale: constant and learned factors on what is added; see Residual.
    """

    norms = ("mixer_norm", "mixer_out_norm", "mlp_norm", "mlp_out_norm")

    def run(self, layer: Any, x: Tensor, step: Step, cache: Cache) -> Tensor:
        x = x + self.scaled(layer, "mixer", layer.mixer_out_norm(layer.mixer(layer.mixer_norm(x), step, cache)))
        return x + self.scaled(layer, "mlp", layer.mlp_out_norm(layer.mlp(layer.mlp_norm(x))))
