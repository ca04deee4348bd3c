"""Learned positions of a grid of patches, resampled once and for all to the grid of another image size."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from zoo.components.position_embedding.learned_grid import LearnedGrid, resample
from zoo.components.registry import part
from zoo.conversion import Conversion, ConversionError, Converted, Work, relative
from zoo.family import expect


@part(
    Conversion,
    "learned_grid_to_learned_grid",
    source="Dosovitskiy et al. 2020 (ViT), arXiv:2010.11929, section 3.2; bicubic as in timm and transformers",
    example={"rows": 6, "columns": 3},
)
@dataclass(frozen=True, kw_only=True)
class GridPositions(Conversion):
    """Images of the new size see exactly what the part resamples for each call; for others the table is now resampled twice.

    rows, columns: of patches. The part's own ``antialias`` says whether to smooth before shrinking (timm does, transformers' ViT
    does not). The weight error is that of the old size: there and back again.
    """

    place = "position"

    rows: int
    columns: int

    def target(self, site: Any, width: int) -> Any:
        if min(self.rows, self.columns) < 1:
            raise ConversionError(f"rows, columns: must be at least 1, got {self.rows} and {self.columns}")
        old = expect(site.position, LearnedGrid)
        return dataclasses.replace(site, position=dataclasses.replace(old, rows=self.rows, columns=self.columns))

    def convert(self, work: Work) -> Converted:
        old, new = (expect(site.position, LearnedGrid) for site in (work.old, work.new))
        prefix, grid = work.held["position.weight"].split([old.prefix, old.rows * old.columns])
        there = resample(grid, (old.rows, old.columns), (new.rows, new.columns), old.antialias)
        back = resample(there, (new.rows, new.columns), (old.rows, old.columns), old.antialias)
        error = relative(back, grid)
        lost = f"images of other than {new.rows} x {new.columns} patches see positions that were resampled twice" if error else ""
        return Converted({"position.weight": torch.cat([prefix, there])}, exact=not lost, error=error, lost=lost)
