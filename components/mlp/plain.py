"""Feed-forward without a gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import MLP, Linear, attach
from zoo.components.ops.activation import ACTIVATIONS, Activation
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(MLP, "plain", source="Vaswani et al. 2017, arXiv:1706.03762, section 3.3", example={"hidden": 24})
@dataclass(frozen=True, kw_only=True)
class Plain(MLP):
    """down(act(up x)): gelu in BERT and GPT-2, relu in OPT, relu_squared in Primer and Nemotron."""

    hidden: int
    activation: Activation = "gelu"
    bias: bool = True
    up: Linear = default(Linear, "dense")
    down: Linear = default(Linear, "dense")

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        if self.hidden < 1:
            yield "hidden", f"must be at least 1, got {self.hidden}"

    def children(self, width: int) -> dict[str, Child]:
        return {"up": Child(self.up, (width, self.hidden, self.bias)), "down": Child(self.down, (self.hidden, width, self.bias))}

    def build(self, width: int) -> nn.Module:
        return PlainMLP(self, width)


class PlainMLP(nn.Module):
    """[..., M] -> [..., M]."""

    up: nn.Module
    down: nn.Module

    def __init__(self, spec: Plain, width: int):
        super().__init__()
        attach(self, spec.children(width))
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))
