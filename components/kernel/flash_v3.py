"""FlashAttention, third loop order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._softmax import SoftmaxKernel
from zoo.components.ops.attention import flash_v3
from zoo.components.registry import part


@part(Kernel, "flash_v3", source="Shah et al. 2024, arXiv:2407.08608, algorithm 2", example={"rows": 3, "columns": 4})
@dataclass(frozen=True, kw_only=True)
class FlashV3(Kernel):
    """As v2, in the order of its two pipelines: products run ahead of the softmax, two query tiles take turns (a reference).

    rows, columns: queries and keys of a tile.
    """

    softmax = True

    rows: int = 128
    columns: int = 128
    lse = True

    def problems(self, projection: Projection) -> Iterator[tuple[str, str]]:
        for name in ("rows", "columns"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"

    def build(self, projection: Projection) -> nn.Module:
        return SoftmaxKernel(partial(flash_v3, rows=self.rows, columns=self.columns))
