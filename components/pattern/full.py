"""Everything sees everything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.contracts import Pattern
from zoo.components.registry import part


@part(Pattern, "full", source="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3 (encoder)")
@dataclass(frozen=True, kw_only=True)
class Full(Pattern):
    """Every token sees every token of its row."""

    whole = True

    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        return torch.ones_like(qpos - kpos, dtype=torch.bool)
