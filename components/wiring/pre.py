"""Pre-norm residual wiring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.components.contracts import Cache, Step, Wiring
from zoo.components.registry import part
from zoo.components.wiring._residual import Residual


@part(Wiring, "pre", source="Xiong et al. 2020, arXiv:2002.04745, figure 1b")
@dataclass(frozen=True, kw_only=True)
class Pre(Residual):
    """x + mixer(norm x), then x + mlp(norm x).

    scale, layer_scale: constant and learned factors on what is added; see Residual.
    """

    norms = ("mixer_norm", "mlp_norm")

    def run(self, layer: Any, x: Tensor, step: Step, cache: Cache) -> Tensor:
        x = x + self.scaled(layer, "mixer", layer.mixer(layer.mixer_norm(x), step, cache))
        return x + self.scaled(layer, "mlp", layer.mlp(layer.mlp_norm(x)))
