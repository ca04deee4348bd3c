"""The last hidden states themselves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import Call, Embed, Head, HeadModule, Linear, Step, attach
from zoo.components.head._pool import pool
from zoo.components.ops.activation import ACTIVATIONS, Activation
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(Head, "hidden", source="Devlin et al. 2018 (BERT), arXiv:1810.04805, section 5.3: features for other models")
@dataclass(frozen=True, kw_only=True)
class Hidden(Head):
    """Every token's vector, as the final norm leaves it.

    pooler: activation of a layer over a row's first token that files of such models hold beside the rest (tanh in BERT); the output
    is the same with it, ``HiddenModule.pooled`` gives the layer's. None for no such layer.
    """

    pooler: Activation | None = None
    out: Linear = default(Linear, "dense")

    def children(self, width: int, embed: Embed) -> dict[str, Child]:
        return {"out": Child(self.out, (width, width, True))} if self.pooler else {}

    def flops(self, call: Call, width: int, embed: Embed) -> float:
        return 0.0

    def build(self, width: int, embed: Embed) -> HeadModule:
        return HiddenModule(self, width, embed)


class HiddenModule(HeadModule):
    """[..., M] -> [..., M]."""

    out: nn.Module

    def __init__(self, spec: Hidden, width: int, embed: Embed):
        super().__init__()
        self.spec = spec
        attach(self, spec.children(width, embed))

    def forward(self, x: Tensor) -> Tensor:
        return x

    def pooled(self, x: Tensor, step: Step) -> Tensor:
        """x [B, T, M], the hidden states -> [B, M]. Raises ValueError where there is no pooler."""
        if self.spec.pooler is None:
            raise ValueError("this head has no pooler; give the model a pooling head, as in override=['head={name: pooling}']")
        return ACTIVATIONS[self.spec.pooler](self.out(pool(x, step.valid, "first")))
