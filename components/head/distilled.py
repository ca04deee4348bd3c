"""Classes from a class token and a distillation token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Call, Embed, Head, HeadModule, Linear, Step, attach
from zoo.components.head._pool import pool
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(Head, "distilled", source="Touvron et al. 2020 (DeiT), arXiv:2012.12877, section 4", example={"labels": 5})
@dataclass(frozen=True, kw_only=True)
class Distilled(Head):
    """The mean of two classifiers' logits: of a row's first token and, trained by a teacher, of its second."""

    labels: int
    bias: bool = True
    out: Linear = default(Linear, "dense")
    taught: Linear = default(Linear, "dense")

    def problems(self, width: int, embed: Embed) -> Iterator[tuple[str, str]]:
        if self.labels < 1:
            yield "labels", f"must be at least 1, got {self.labels}"

    def children(self, width: int, embed: Embed) -> dict[str, Child]:
        at = (width, self.labels, self.bias)
        return {"out": Child(self.out, at), "taught": Child(self.taught, at)}

    def flops(self, call: Call, width: int, embed: Embed) -> float:
        return super().flops(call.tokens(1), width, embed)

    def build(self, width: int, embed: Embed) -> HeadModule:
        return DistilledModule(self, width, embed)


class DistilledModule(HeadModule):
    """[B, 2M], the two tokens end to end -> [B, labels]."""

    out: nn.Module
    taught: nn.Module

    def __init__(self, spec: Distilled, width: int, embed: Embed):
        super().__init__()
        attach(self, spec.children(width, embed))

    def pool(self, x: Tensor, step: Step) -> Tensor:
        return torch.cat([pool(x, step.valid, "first", skip) for skip in (0, 1)], -1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return (self.out(first) + self.taught(second)) / 2
