"""Embeddings of whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Call, Embed, Head, HeadModule, Linear, Step, attach
from zoo.components.head._pool import Pool, pool, pooled_width
from zoo.components.ops.activation import ACTIVATIONS, Activation
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(
    Head,
    "pooling",
    source="Reimers & Gurevych 2019 (Sentence-BERT), arXiv:1908.10084, section 3; projection: Radford et al. 2021 (CLIP), arXiv:2103.00020",
)
@dataclass(frozen=True, kw_only=True)
class Pooling(Head):
    """One vector per row: the mean of its tokens, its first or its last one, or the first and the mean.

    skip: tokens at the start of a row that are left out (class and register tokens of images). only: the id that tokens must have
    to count (CLIP pools at the first end-of-text token), None for all. project: width of a linear map of that vector, None for no
    map; bias and activation are the map's. normalize: the result to length 1.
    """

    pool: Pool = "mean"
    skip: int = 0
    only: int | None = None
    project: int | None = None
    bias: bool = False
    activation: Activation = "identity"
    normalize: bool = False
    out: Linear = default(Linear, "dense")

    def problems(self, width: int, embed: Embed) -> Iterator[tuple[str, str]]:
        if self.skip < 0:
            yield "skip", f"must not be negative, got {self.skip}"
        if self.project is not None and self.project < 1:
            yield "project", f"must be at least 1, got {self.project}"
        if self.project is None and (self.bias or self.activation != "identity"):
            yield "project", "bias and activation belong to the projection, of which there is none"
        vocab = getattr(embed, "vocab", 0)
        if self.only is not None and not 0 <= self.only < vocab:
            yield "only", f"must be one of the embedding's {vocab} token ids, got {self.only}"

    def children(self, width: int, embed: Embed) -> dict[str, Child]:
        if self.project is None:
            return {}
        return {"out": Child(self.out, (pooled_width(self.pool, width), self.project, self.bias))}

    def flops(self, call: Call, width: int, embed: Embed) -> float:
        return super().flops(call.tokens(1), width, embed)

    def build(self, width: int, embed: Embed) -> HeadModule:
        return PoolingModule(self, width, embed)


class PoolingModule(HeadModule):
    """[B, M] (twice as wide for the first token and the mean) -> [B, M or project]."""

    out: nn.Module

    def __init__(self, spec: Pooling, width: int, embed: Embed):
        super().__init__()
        self.spec = spec
        attach(self, spec.children(width, embed))

    def pool(self, x: Tensor, step: Step) -> Tensor:
        valid = step.valid
        if self.spec.only is not None:
            if step.inputs is None:
                raise ValueError("pooling at a token id needs the ids; call the model, or set Step.inputs")
            valid = valid & (step.inputs == self.spec.only)
        return pool(x, valid, self.spec.pool, self.spec.skip)

    def forward(self, x: Tensor) -> Tensor:
        if self.spec.project is not None:
            x = ACTIVATIONS[self.spec.activation](self.out(x))
        return F.normalize(x, dim=-1) if self.spec.normalize else x
