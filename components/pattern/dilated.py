"""A causal sliding window with gaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import Pattern
from zoo.components.registry import part


@part(Pattern, "dilated", source="Beltagy et al. 2020, arXiv:2004.05150, section 3.1", example={"size": 3, "dilation": 2})
@dataclass(frozen=True, kw_only=True)
class Dilated(Pattern):
    """A token sees itself and ``size - 1`` earlier tokens, ``dilation`` positions apart (1: no gaps)."""

    size: int
    dilation: int
    causal = True

    @property
    def window(self) -> int:
        return (self.size - 1) * self.dilation + 1

    def problems(self) -> Iterator[tuple[str, str]]:
        for name in ("size", "dilation"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"

    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        back = qpos - kpos
        return (back >= 0) & (back < self.window) & (back % self.dilation == 0)
