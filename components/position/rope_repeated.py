"""The same rotation in each of several slices: the shared rotated key of a latent projection that was made of several key heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import Position, PositionModule, Step
from zoo.components.position.rope import Rope
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(Position, "rope_repeated", source="Meng et al. 2025 (TransMLA), arXiv:2502.07864, section 4", example={"slices": 2})
@dataclass(frozen=True, kw_only=True)
class RopeRepeated(Position):
    """The same rotary encoding in each of ``slices`` equal slices of the channels."""

    slices: int
    rope: Position = default(Position, "rope")

    def problems(self, width: int, heads: int) -> Iterator[tuple[str, str]]:
        if self.slices < 1 or width % self.slices:
            yield "slices", f"{width} channels do not divide into {self.slices} equal slices"
        if not isinstance(self.rope, Rope):
            yield "rope", f"must be rope, got {self.rope.name}"

    def children(self, width: int, heads: int) -> dict[str, Child]:
        return {"rope": Child(self.rope, (width // self.slices, heads))}

    def build(self, width: int, heads: int) -> PositionModule:
        return RopeRepeatedModule(self, width, heads)


class RopeRepeatedModule(PositionModule):
    def __init__(self, spec: RopeRepeated, width: int, heads: int):
        super().__init__()
        self.slices = spec.slices
        self.rope: PositionModule = spec.rope.build(width // spec.slices, heads)
        self.logit_scale = self.rope.logit_scale

    def rotate(self, x: Tensor, step: Step) -> Tensor:
        split = x.unflatten(-1, (self.slices, -1))
        return self.rope.rotate(split.flatten(2, 3), step).view(split.shape).flatten(3)
