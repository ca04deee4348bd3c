"""Norms after each branch, inside the residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.components.contracts import Cache, Step, Wiring
from zoo.components.registry import part
from zoo.components.wiring._residual import Residual


@part(Wiring, "output_norm", source="OLMo 2, arXiv:2501.00656, section 3.3; Liu et al. 2021 (Swin v2), arXiv:2111.09883")
@dataclass(frozen=True, kw_only=True)
class OutputNorm(Residual):
    """x + norm(mixer(x)), then x + norm(mlp(x)): the stream itself is never normalised.

    scale, layer_scale: constant and learned factors on what is added; see Residual.
    """

    norms = ("mixer_out_norm", "mlp_out_norm")

    def run(self, layer: Any, x: Tensor, step: Step, cache: Cache) -> Tensor:
        x = x + self.scaled(layer, "mixer", layer.mixer_out_norm(layer.mixer(x, step, cache)))
        return x + self.scaled(layer, "mlp", layer.mlp_out_norm(layer.mlp(x)))
