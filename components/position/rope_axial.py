"""Rotary position encoding over the axes of a grid, each with channels of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import Position, PositionModule, Step
from zoo.components.ops.rotary import Layout, frequencies, tables, turn
from zoo.components.registry import part


@part(Position, "rope_axial", source="Heo et al. 2024 (RoPE-ViT), arXiv:2403.13298, section 3.2, axial frequency")
@dataclass(frozen=True, kw_only=True)
class RopeAxial(Position):
    """Channels in equal runs, one for each of ``axes``; a run turns as rope by that coordinate of the token.

    axes: the coordinates of ``Step.axes`` in the order of the runs; (1, 0) where a model turns by column first. Tokens without a
    place in the grid (class, registers) have coordinates -1 and are not turned.
    """

    theta: float = 100.0
    axes: tuple[int, ...] = (0, 1)
    layout: Layout = "interleaved"

    def problems(self, width: int, heads: int) -> Iterator[tuple[str, str]]:
        if sorted(self.axes) != list(range(len(self.axes))) or not self.axes:
            yield "axes", f"must name each coordinate once, got {list(self.axes)}"
        elif width % (2 * len(self.axes)):
            yield "axes", f"{len(self.axes)} runs of channel pairs need a width that {2 * len(self.axes)} divides, got {width}"
        if not (math.isfinite(self.theta) and self.theta > 0):
            yield "theta", f"must be a positive number, got {self.theta}"

    @property
    def axes_turned(self) -> int:
        return len(self.axes)

    def build(self, width: int, heads: int) -> PositionModule:
        return RopeAxialModule(self, width)


class RopeAxialModule(PositionModule):
    """Holds no tensors, like rope."""

    def __init__(self, spec: RopeAxial, width: int):
        super().__init__()
        self.spec, self.width = spec, width
        self.key = f"{spec.key} {width}"

    def rotate(self, x: Tensor, step: Step) -> Tensor:
        cos, sin = step.once(self.key, lambda: tables(self.angle(step)[:, :, None], self.spec.layout))
        return turn(x, cos.to(x.dtype), sin.to(x.dtype), self.spec.layout)

    def angle(self, step: Step) -> Tensor:
        """[B, T, width/2] fp32."""
        count = len(self.spec.axes)
        places = step.coordinates(count)[..., list(self.spec.axes), None].clamp(min=0).float()
        return (places * frequencies(self.spec.theta, self.width // count).to(places.device)).flatten(-2)
