"""Grouped-query projection whose head outputs pass a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Linear, Operands, PositionModule, Projection, ProjectionModule, Step
from zoo.components.projection.gqa import GroupedQuery, GroupedQueryProjection
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(
    Projection,
    "gqa_output_gated",
    source="Qiu et al. 2025, arXiv:2505.06708, section 2.2 (elementwise, after attention); Qwen3NextAttention in transformers",
    example={"heads": 4, "kv_heads": 2, "head_dim": 8},
)
@dataclass(frozen=True, kw_only=True)
class OutputGatedGroupedQuery(GroupedQuery):
    """gqa whose attention output is multiplied by sigmoid(x W), a number for each channel of each head. Other fields: see gqa."""

    gate: Linear = default(Linear, "dense")
    finishes = True

    def children(self, width: int) -> dict[str, Child]:
        return super().children(width) | {"gate": Child(self.gate, (width, self.heads * self.head_dim, self.bias))}

    def build(self, width: int) -> ProjectionModule:
        return OutputGatedGroupedQueryProjection(self, width)


class OutputGatedGroupedQueryProjection(GroupedQueryProjection):
    gate: nn.Module

    def write(self, x: Tensor, step: Step, position: PositionModule) -> tuple[Tensor, dict[str, Tensor]]:
        """As gqa, and gate [B, T, H, D] of the new tokens, which no cache keeps."""
        q, new = super().write(x, step, position)
        return q, new | {"gate": self.gate(x).unflatten(-1, (self.spec.heads, -1))}

    def read(self, q: Tensor, streams: Mapping[str, Tensor]) -> Operands:
        gate = streams["gate"]
        return Operands(q, streams["k"], streams["v"], self.scale, finish=lambda o: o * torch.sigmoid(gate))
