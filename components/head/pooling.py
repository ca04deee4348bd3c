"""Embeddings of whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from zoo.components.contracts import Embed, Head, HeadModule, Step
from zoo.components.head._pool import Pool, pool
from zoo.components.registry import part


@part(Head, "pooling", source="Reimers & Gurevych 2019 (Sentence-BERT), arXiv:1908.10084, section 3")
@dataclass(frozen=True, kw_only=True)
class Pooling(Head):
    """One vector per row: the mean of its tokens, its first or its last one.

    skip: tokens at the start of a row that are left out (class and register tokens of images). normalize: to length 1.
    """

    pool: Pool = "mean"
    skip: int = 0
    normalize: bool = False

    def problems(self, width: int, embed: Embed) -> Iterator[tuple[str, str]]:
        if self.skip < 0:
            yield "skip", f"must not be negative, got {self.skip}"

    def build(self, width: int, embed: Embed) -> HeadModule:
        return PoolingModule(self)


class PoolingModule(HeadModule):
    """[B, M] -> [B, M]."""

    def __init__(self, spec: Pooling):
        super().__init__()
        self.spec = spec

    def pool(self, x: Tensor, step: Step) -> Tensor:
        return pool(x, step.valid, self.spec.pool, self.spec.skip)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) if self.spec.normalize else x
