"""Grouped-query projection that also makes gates for kernels of several branches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import Linear, Operands, PositionModule, Projection, ProjectionModule, Step
from zoo.components.projection.gqa import GroupedQuery, GroupedQueryProjection
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(
    Projection,
    "gqa_gated",
    source="Yuan et al. 2025, arXiv:2502.11089, section 3.2 (gates from the layer's input)",
    example={"heads": 4, "kv_heads": 2, "head_dim": 8},
)
@dataclass(frozen=True, kw_only=True)
class GatedGroupedQuery(GroupedQuery):
    """gqa with ``gates`` numbers per query head beside its query; the kernel squashes them and says what they weigh."""

    gates: int = 3
    gate: Linear = default(Linear, "dense")
    provides = frozenset({"gates"})

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        yield from super().problems(width)
        if self.gates < 1:
            yield "gates", f"must be at least 1, got {self.gates}"

    def children(self, width: int) -> dict[str, Child]:
        return super().children(width) | {"gate": Child(self.gate, (width, self.heads * self.gates, False))}

    def build(self, width: int) -> ProjectionModule:
        return GatedGroupedQueryProjection(self, width)


class GatedGroupedQueryProjection(GroupedQueryProjection):
    gate: nn.Module

    def write(self, x: Tensor, step: Step, position: PositionModule) -> tuple[Tensor, dict[str, Tensor]]:
        """As gqa, and gates [B, T, H, gates] of the new tokens, which no cache keeps."""
        q, new = super().write(x, step, position)
        return q, new | {"gates": self.gate(x).unflatten(-1, (self.spec.heads, -1))}

    def read(self, q: Tensor, streams: Mapping[str, Tensor]) -> Operands:
        a = super().read(q, streams)
        return Operands(a.q, a.k, a.v, a.scale, {"gates": streams["gates"]})
