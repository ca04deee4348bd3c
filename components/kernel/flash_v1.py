"""FlashAttention, first loop order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._softmax import SoftmaxKernel
from zoo.components.ops.attention import flash_v1
from zoo.components.registry import part


@part(Kernel, "flash_v1", source="Dao et al. 2022, arXiv:2205.14135, algorithm 1", example={"rows": 3, "columns": 4})
@dataclass(frozen=True, kw_only=True)
class FlashV1(Kernel):
    """Tiles with the loop over keys outside; outputs stay normalised in memory and are rewritten for every key block.

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
        return SoftmaxKernel(partial(flash_v1, rows=self.rows, columns=self.columns))
