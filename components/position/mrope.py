"""Rotary position encoding of text with images and video."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zoo.components.contracts import Position, PositionModule, Step
from zoo.components.position.rope import Rope, RopeModule
from zoo.components.registry import part


@part(
    Position,
    "mrope",
    source="Qwen2-VL, arXiv:2409.12191, section 2.1 (sectioned); Qwen3-VL, arXiv:2511.21631 (interleaved)",
    example={"sections": [2, 1, 1]},
)
@dataclass(frozen=True, kw_only=True)
class MRope(Rope):
    """rope in which each pair of channels turns by one of several coordinates: time, row and column.

    sections: pairs per coordinate, all pairs together. order: ``sectioned`` gives each coordinate a run of pairs, the fastest
    first; ``interleaved`` deals pairs out in turn while a coordinate has some left, the first coordinate takes what remains.
    Text, whose coordinates are all its position, is turned as by rope.
    """

    sections: tuple[int, ...]
    order: Literal["sectioned", "interleaved"] = "sectioned"

    def problems(self, width: int, heads: int) -> Iterator[tuple[str, str]]:
        yield from super().problems(width, heads)
        if sum(self.sections) != (self.width or width) // 2 or min(self.sections, default=0) < 0:
            yield "sections", f"must add up to {(self.width or width) // 2} pairs of channels, got {list(self.sections)}"

    @property
    def axes_turned(self) -> int:
        return len(self.sections)

    def axis_of_pair(self) -> list[int]:
        """The coordinate that each pair of channels turns by."""
        if self.order == "sectioned":
            return [axis for axis, pairs in enumerate(self.sections) for _ in range(pairs)]
        count = len(self.sections)
        return [i % count if i < self.sections[i % count] * count else 0 for i in range(sum(self.sections))]

    def build(self, width: int, heads: int) -> PositionModule:
        return MRopeModule(self, self.width or width)


class MRopeModule(RopeModule):
    spec: MRope

    def angle(self, step: Step) -> Tensor:
        places = step.coordinates(len(self.spec.sections)).clamp(min=0).float()
        chosen = torch.tensor(self.spec.axis_of_pair(), device=places.device)
        return places[..., chosen] * self.frequencies(step)
