"""Attention in one pass over the keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._softmax import SoftmaxKernel
from zoo.components.ops.attention import online
from zoo.components.registry import part


@part(
    Kernel, "online", source="Rabe and Staats 2021, arXiv:2112.05682; Milakov and Gimelshein 2018, arXiv:1805.02867", example={"block": 4}
)
@dataclass(frozen=True, kw_only=True)
class Online(Kernel):
    """One pass over blocks of ``block`` keys with a running maximum and sum; memory grows with the block, not the row."""

    softmax = True

    block: int = 512
    lse = True

    def problems(self, projection: Projection) -> Iterator[tuple[str, str]]:
        if self.block < 1:
            yield "block", f"must be at least 1, got {self.block}"

    def build(self, projection: Projection) -> nn.Module:
        return SoftmaxKernel(partial(online, block=self.block))
