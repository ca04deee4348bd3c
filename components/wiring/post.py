"""Post-norm residual wiring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.components.contracts import Cache, Step, Wiring
from zoo.components.registry import part
from zoo.components.wiring._residual import Residual


@part(Wiring, "post", source="Vaswani et al. 2017, arXiv:1706.03762, section 3.1; shortcut: Wang et al. 2022 (DeepNet), arXiv:2203.00555")
@dataclass(frozen=True, kw_only=True)
class Post(Residual):
    """norm(x + mixer(x)), then norm(x + mlp(x)), as in BERT.

    shortcut: multiplies x where it is added to (DeepNet's alpha). scale, layer_scale: constant and learned factors on what is
    added; see Residual.
    """

    norms = ("mixer_norm", "mlp_norm")

    shortcut: float = 1.0

    def run(self, layer: Any, x: Tensor, step: Step, cache: Cache) -> Tensor:
        x = layer.mixer_norm(self.shortcut * x + self.scaled(layer, "mixer", layer.mixer(x, step, cache)))
        return layer.mlp_norm(self.shortcut * x + self.scaled(layer, "mlp", layer.mlp(x)))
