"""Another number of learned positions: the table is stretched, shrunk or cut."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.position_embedding.learned import Learned
from zoo.components.registry import part
from zoo.conversion import Conversion, ConversionError, Converted, Work, relative
from zoo.family import expect
from zoo.model import ModelSpec


@part(Conversion, "learned_to_learned", source="Zhang et al. 2024 (Long-CLIP), arXiv:2403.15378, section 3.2", example={"count": 60})
@dataclass(frozen=True, kw_only=True)
class LearnedPositions(Conversion):
    """The first ``keep`` positions stay, the others are interpolated linearly between the same first and last one.

    count: positions that there will be. keep: those that texts use most and that are trained best; as many as ``count`` cuts the
    table instead, exact for texts that still fit. The weight error compares the positions that both tables have.
    """

    place = "position"

    count: int
    keep: int = 0

    def target(self, site: Any, width: int) -> Any:
        old = expect(site.position, Learned)
        if self.count < 1:
            raise ConversionError(f"count: must be at least 1, got {self.count}")
        most = self.count if self.count <= old.count else old.count - 1
        if not 0 <= self.keep <= most:
            raise ConversionError(f"keep: must lie in 0..{most} for {self.count} positions out of {old.count}, got {self.keep}")
        return dataclasses.replace(site, position=dataclasses.replace(old, count=self.count))

    def context(self, spec: ModelSpec) -> int:
        return self.count

    def convert(self, work: Work) -> Converted:
        old = expect(work.old.position, Learned)
        offset, table = work.held["position.weight"].split([old.offset, old.count])
        new, shared = stretched(table, self.count, self.keep), min(self.count, old.count)
        error = relative(new[:shared], table[:shared])
        return Converted({"position.weight": torch.cat([offset, new])}, error == 0, error, self.lost(old.count))

    def lost(self, old: int) -> str:
        if self.keep == self.count < old:
            return f"texts of more than {self.count} tokens no longer fit"
        step = (old - self.keep - 1) / max(1, self.count - self.keep - 1)
        return "" if self.count == old else f"positions from {self.keep} on are {step:.3g} trained steps apart"


def stretched(table: Tensor, count: int, keep: int) -> Tensor:
    """[old, M] -> [count, M]."""
    if keep == count:
        return table[:count]
    rest = F.interpolate(table[keep:].T[None], count - keep, mode="linear", align_corners=True)[0].T
    return torch.cat([table[:keep], rest])
