"""Unscaled rotary frequencies."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import RopeScaling
from zoo.components.ops.rotary import frequencies
from zoo.components.registry import part


@part(RopeScaling, "none", source="Su et al. 2021, arXiv:2104.09864")
@dataclass(frozen=True, kw_only=True)
class NoScaling(RopeScaling):
    """Frequencies as trained."""

    def frequencies(self, base: float, width: int, length: Tensor | None) -> Tensor:
        return frequencies(base, width)
