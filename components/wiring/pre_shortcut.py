"""Pre-norm wiring whose residual starts at the norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.components.contracts import Cache, Step, Wiring
from zoo.components.registry import part
from zoo.components.wiring._residual import Residual


@part(Wiring, "pre_shortcut", source="Shoeybi et al. 2019 (Megatron-LM), --apply-residual-connection-post-layernorm; BLOOM, MiniMax")
@dataclass(frozen=True, kw_only=True)
class PreShortcut(Residual):
    """y = norm x, y + mixer(y), then the same with the MLP: what is added to is the norm's result, not the stream.

    mixer_shortcut, mlp_shortcut: multiply y where it is added to; mixer_gain, mlp_gain: multiply what is added (MiniMax's alpha and
    beta). scale, layer_scale: constant and learned factors on what is added; see Residual.
    """

    norms = ("mixer_norm", "mlp_norm")

    mixer_shortcut: float = 1.0
    mlp_shortcut: float = 1.0
    mixer_gain: float = 1.0
    mlp_gain: float = 1.0

    def run(self, layer: Any, x: Tensor, step: Step, cache: Cache) -> Tensor:
        y = layer.mixer_norm(x)
        mixed = self.mixer_gain * self.scaled(layer, "mixer", layer.mixer(y, step, cache))
        y = layer.mlp_norm(self.mixer_shortcut * y + mixed)
        return self.mlp_shortcut * y + self.mlp_gain * self.scaled(layer, "mlp", layer.mlp(y))
