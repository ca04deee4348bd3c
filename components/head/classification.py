"""Classes of whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import Call, Embed, Head, HeadModule, Linear, Norm, Step, attach
from zoo.components.head._pool import Pool, pool, pooled_width
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
    """Logits over ``labels`` classes, from a row's first token, its last one, the mean of its tokens, or the first and the mean.

    skip: tokens at the start of a row that are left out (class and register tokens of images, for a mean). dense: activation of a
    layer before the output (tanh in BERT's pooler), None for no such layer; dense_width: its width, None is the model's;
    dense_bias: whether it has a bias, None is as the output; norm: of what it gives (ModernBERT), None for none.
    """

    labels: int
    pool: Pool = "first"
    skip: int = 0
    dense: Activation | None = None
    dense_width: int | None = None
    dense_bias: bool | None = None
    norm: Norm | None = None
    bias: bool = True
    hidden: Linear = default(Linear, "dense")
    out: Linear = default(Linear, "dense")

    def problems(self, width: int, embed: Embed) -> Iterator[tuple[str, str]]:
        for name, least in (("labels", 1), ("skip", 0)):
            if getattr(self, name) < least:
                yield name, f"must be at least {least}, got {getattr(self, name)}"
        if self.dense_width is not None and (self.dense is None or self.dense_width < 1):
            yield "dense_width", f"is the width of a dense layer, at least 1; got {self.dense_width} with dense {self.dense}"
        for name in ("dense_bias", "norm"):
            if getattr(self, name) is not None and self.dense is None:
                yield name, "belongs to the dense layer, of which there is none"

    def children(self, width: int, embed: Embed) -> dict[str, Child]:
        pooled = pooled_width(self.pool, width)
        if not self.dense:
            return {"out": Child(self.out, (pooled, self.labels, self.bias))}
        between = self.dense_width or width
        bias = self.bias if self.dense_bias is None else self.dense_bias
        norm = {} if self.norm is None else {"norm": Child(self.norm, (between,))}
        hidden, out = Child(self.hidden, (pooled, between, bias)), Child(self.out, (between, self.labels, self.bias))
        return {"hidden": hidden, **norm, "out": out}

    def flops(self, call: Call, width: int, embed: Embed) -> float:
        return super().flops(call.tokens(1), width, embed)

    def build(self, width: int, embed: Embed) -> HeadModule:
        return ClassificationModule(self, width, embed)


class ClassificationModule(HeadModule):
    """[..., M] (twice as wide for the first token and the mean) -> [..., labels]."""

    out: nn.Module
    hidden: nn.Module
    norm: nn.Module

    def __init__(self, spec: Classification, width: int, embed: Embed):
        super().__init__()
        self.spec = spec
        attach(self, spec.children(width, embed))

    def pool(self, x: Tensor, step: Step) -> Tensor:
        return pool(x, step.valid, self.spec.pool, self.spec.skip)

    def forward(self, x: Tensor) -> Tensor:
        if self.spec.dense:
            x = ACTIVATIONS[self.spec.dense](self.hidden(x))
        if self.spec.norm is not None:
            x = self.norm(x)
        return self.out(x)
