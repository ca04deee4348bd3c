"""Learned positions on a grid of patches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import PositionEmbedding, Step
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(
    PositionEmbedding,
    "learned_grid",
    source="Dosovitskiy et al. 2020 (ViT), arXiv:2010.11929, section 3.1 and, for other sizes, 3.2",
    example={"rows": 4, "columns": 4},
)
@dataclass(frozen=True, kw_only=True)
class LearnedGrid(PositionEmbedding):
    """Adds one learned vector per place of a grid; for a grid of another size the vectors are resampled (bicubic).

    rows, columns: the grid that was learned. prefix: tokens before the grid that have a vector of their own, which is never
    resampled (1 for a class token); further tokens without a place in the grid (registers) get none. antialias: smooth before
    resampling to a smaller grid (DINOv2 with registers).
    """

    rows: int
    columns: int
    prefix: int = 1
    antialias: bool = False

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        for name, least in (("rows", 1), ("columns", 1), ("prefix", 0)):
            if getattr(self, name) < least:
                yield name, f"must be at least {least}, got {getattr(self, name)}"

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return {"weight": TensorInfo((self.prefix + self.rows * self.columns, width))}

    def build(self, width: int) -> nn.Module:
        return LearnedGridModule(self, width)


class LearnedGridModule(nn.Module):
    """(x [B, T, M], step) -> [B, T, M]. The tokens are the prefix, others without a place, then the whole grid row by row."""

    def __init__(self, spec: LearnedGrid, width: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.randn(spec.prefix + spec.rows * spec.columns, width) * 0.02)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        rows, columns = (int(n) + 1 for n in step.coordinates(2)[0, -1])  # the last patch is the corner
        prefix, tokens, patches = self.spec.prefix, x.shape[1], rows * columns
        if tokens < prefix + patches:
            raise ValueError(f"a grid of {rows} x {columns} patches after {prefix} other tokens does not fit {tokens} tokens")
        bare = x.new_zeros(tokens - prefix - patches, x.shape[2])
        return x + torch.cat([self.weight[:prefix], bare, self.resampled(rows, columns)])

    def resampled(self, rows: int, columns: int) -> Tensor:
        """[rows * columns, M]."""
        return resample(self.weight[self.spec.prefix :], (self.spec.rows, self.spec.columns), (rows, columns), self.spec.antialias)


def resample(grid: Tensor, old: tuple[int, int], new: tuple[int, int], antialias: bool) -> Tensor:
    """[rows * columns of ``old``, M] -> those of ``new``, bicubic in float32."""
    if new == old:
        return grid
    image = grid.float().unflatten(0, old).permute(2, 0, 1)[None]
    resized = F.interpolate(image, new, mode="bicubic", align_corners=False, antialias=antialias)
    return resized.flatten(2)[0].T.to(grid.dtype)
