"""Classes of whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import Embed, Head, HeadModule, Linear, Step, attach
from zoo.components.head._pool import Pool, pool
from zoo.components.ops.activation import ACTIVATIONS, Activation
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(
    Head,
    "classification",
    source="Devlin et al. 2018 (BERT), arXiv:1810.04805, section 4.1; Dosovitskiy et al. 2020 (ViT), arXiv:2010.11929, section 3.1",
    example={"labels": 5},
)
@dataclass(frozen=True, kw_only=True)
class Classification(Head):
    """Logits over ``labels`` classes, from a row's first token, its last one or the mean of its tokens.

    skip: tokens at the start of a row that are left out (class and register tokens of images, for a mean). dense: activation of a
    layer of the model's width before the output (tanh in BERT's pooler), None for no such layer.
    """

    labels: int
    pool: Pool = "first"
    skip: int = 0
    dense: Activation | None = None
    bias: bool = True
    hidden: Linear = default(Linear, "dense")
    out: Linear = default(Linear, "dense")

    def problems(self, width: int, embed: Embed) -> Iterator[tuple[str, str]]:
        for name, least in (("labels", 1), ("skip", 0)):
            if getattr(self, name) < least:
                yield name, f"must be at least {least}, got {getattr(self, name)}"

    def children(self, width: int, embed: Embed) -> dict[str, Child]:
        hidden = {"hidden": Child(self.hidden, (width, width, self.bias))} if self.dense else {}
        return {**hidden, "out": Child(self.out, (width, self.labels, self.bias))}

    def build(self, width: int, embed: Embed) -> HeadModule:
        return ClassificationModule(self, width, embed)


class ClassificationModule(HeadModule):
    """[..., M] -> [..., labels]."""

    out: nn.Module
    hidden: nn.Module

    def __init__(self, spec: Classification, width: int, embed: Embed):
        super().__init__()
        self.spec = spec
        attach(self, spec.children(width, embed))

    def pool(self, x: Tensor, step: Step) -> Tensor:
        return pool(x, step.valid, self.spec.pool, self.spec.skip)

    def forward(self, x: Tensor) -> Tensor:
        if self.spec.dense:
            x = ACTIVATIONS[self.spec.dense](self.hidden(x))
        return self.out(x)
