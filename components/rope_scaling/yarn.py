"""YaRN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.contracts import RopeScaling
from zoo.components.ops.rotary import correction, frequencies
from zoo.components.registry import part
from zoo.components.rope_scaling._checks import positive


@part(
    RopeScaling,
    "yarn",
    source="Peng et al. 2023, arXiv:2309.00071, section 3.4; mscales: DeepSeek-V2, arXiv:2405.04434",
    example={"factor": 4.0, "context": 8},
)
@dataclass(frozen=True, kw_only=True)
class Yarn(RopeScaling):
    """Fast channels keep their frequency, slow ones are divided by ``factor``, with a ramp between; cos and sin are scaled.

    beta_fast, beta_slow: turns within ``context`` at which the ramp begins and ends. truncate: round the ramp's ends to channels.
    mscale and mscale_all_dim: cos and sin are scaled by mscale(mscale) / mscale(mscale_all_dim) where both are given.
    attention_scale: overrides that factor. scale_logits: also multiply the logits by mscale(mscale_all_dim) squared (DeepSeek).
    """

    factor: float
    context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_scale: float | None = None
    scale_logits: bool = False

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        yield from positive(self, "factor", "context", "beta_fast", "beta_slow")

    def frequencies(self, base: float, width: int, length: Tensor | None) -> Tensor:
        low, high = (correction(beta, base, width, self.context) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        ramp = (torch.arange(width // 2).float() - low) / max(high - low, 0.001)
        keep = 1 - ramp.clamp(0, 1)
        plain = frequencies(base, width)
        return plain / self.factor * (1 - keep) + plain * keep

    @property
    def attention_factor(self) -> float:
        if self.attention_scale is not None:
            return self.attention_scale
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def logit_scale(self) -> float:
        return self._mscale(self.mscale_all_dim) ** 2 if self.scale_logits and self.mscale_all_dim else 1.0

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
