"""Flash decoding: the keys are cut into parts that are computed side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._softmax import SoftmaxKernel
from zoo.components.ops.attention import split
from zoo.components.registry import part


@part(Kernel, "split", source="Dao, Haziza, Massa, Sizov 2023, Flash-Decoding (PyTorch blog)", example={"parts": 3})
@dataclass(frozen=True, kw_only=True)
class Split(Kernel):
    """Keys in ``parts`` runs, each with a softmax of its own, merged by log-sum-exp: decoding fills the device at batch 1."""

    softmax = True

    parts: int = 8
    lse = True

    def problems(self, projection: Projection) -> Iterator[tuple[str, str]]:
        if self.parts < 1:
            yield "parts", f"must be at least 1, got {self.parts}"

    def build(self, projection: Projection) -> nn.Module:
        return SoftmaxKernel(partial(split, parts=self.parts))
