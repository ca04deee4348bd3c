"""Gated feed-forward (SwiGLU and its relatives)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import MLP, Linear, attach
from zoo.components.ops.activation import ACTIVATIONS, Activation
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(MLP, "gated", source="Shazeer 2020, arXiv:2002.05202, section 2", example={"hidden": 24})
@dataclass(frozen=True, kw_only=True)
class Gated(MLP):
    """down(act(gate x) * up x): SwiGLU with silu, GeGLU with gelu, ReGLU with relu, GLU with sigmoid, bilinear with identity."""

    hidden: int
    activation: Activation = "silu"
    bias: bool = False
    gate: Linear = default(Linear, "dense")
    up: Linear = default(Linear, "dense")
    down: Linear = default(Linear, "dense")

    def children(self, width: int) -> dict[str, Child]:
        return {
            "gate": Child(self.gate, (width, self.hidden, self.bias)),
            "up": Child(self.up, (width, self.hidden, self.bias)),
            "down": Child(self.down, (self.hidden, width, self.bias)),
        }

    def build(self, width: int) -> nn.Module:
        return GatedMLP(self, width)


class GatedMLP(nn.Module):
    """[..., M] -> [..., M]."""

    gate: nn.Module
    up: nn.Module
    down: nn.Module

    def __init__(self, spec: Gated, width: int):
        super().__init__()
        attach(self, spec.children(width))
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))
