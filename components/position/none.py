"""No position encoding."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Position, PositionModule
from zoo.components.registry import part


@part(Position, "none", source="Kazemnejad et al. 2023, arXiv:2305.19466")
@dataclass(frozen=True, kw_only=True)
class NoPosition(Position):
    """Attention is told nothing of positions; only the pattern orders tokens."""

    def build(self, width: int, heads: int) -> PositionModule:
        return PositionModule()
