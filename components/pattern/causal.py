"""No token sees a later one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import Pattern
from zoo.components.registry import part


@part(Pattern, "causal", source="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3 (decoder)")
@dataclass(frozen=True, kw_only=True)
class Causal(Pattern):
    """A token sees itself and all earlier ones."""

    causal = True
    whole = True

    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        return kpos <= qpos
