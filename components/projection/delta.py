"""The projection of DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Projection, ProjectionModule
from zoo.components.projection._delta import DeltaBase, DeltaModule
from zoo.components.registry import part


@part(
    Projection,
    "delta",
    source="Yang et al. 2024, arXiv:2406.06484, section 3.3",
    example={"heads": 2, "key_dim": 8, "value_dim": 6, "conv": 3},
)
@dataclass(frozen=True, kw_only=True)
class Delta(DeltaBase):
    """Queries, keys and values through a short convolution and SiLU, and a rate in 0..1 per token and head. Fields: see DeltaBase."""

    provides = frozenset({"beta"})

    @property
    def query_heads(self) -> int:
        return self.heads

    def build(self, width: int) -> ProjectionModule:
        return DeltaModule(self, width)
