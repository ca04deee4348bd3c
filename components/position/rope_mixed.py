"""Rotary position encoding over rows and columns with learned frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Position, PositionModule, Step
from zoo.components.ops.rotary import Layout, tables, turn
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Position, "rope_mixed", source="Heo et al. 2024 (RoPE-ViT), arXiv:2403.13298, section 3.2, mixed learnable frequency")
@dataclass(frozen=True, kw_only=True)
class RopeMixed(Position):
    """Each pair of channels turns by a learned sum over both coordinates of the token, so that diagonals can be told apart.

    theta: sets the first magnitudes. sets: how many heads have frequencies of their own, at most the key/value heads, since
    queries turn as their keys do: the paper's models have one a head.
    """

    theta: float = 10.0
    sets: int = 1
    layout: Layout = "interleaved"

    def problems(self, width: int, heads: int) -> Iterator[tuple[str, str]]:
        if width % 4:
            yield "", f"two directions a frequency need a width that 4 divides, got {width}"
        if self.sets < 1 or heads % self.sets:
            yield "sets", f"must divide the {heads} query heads, got {self.sets}"

    @property
    def axes_turned(self) -> int:
        return 2

    def own_tensors(self, width: int, heads: int) -> dict[str, TensorInfo]:
        return {"frequencies": TensorInfo((2, self.sets, width // 2))}

    def build(self, width: int, heads: int) -> PositionModule:
        return RopeMixedModule(self, width)


class RopeMixedModule(PositionModule):
    """frequencies: [2, sets, width/2] radians per row and per column; as drawn first, pairs i and i + width/4 are perpendicular."""

    def __init__(self, spec: RopeMixed, width: int):
        super().__init__()
        self.spec = spec
        magnitude = spec.theta ** (-torch.arange(0, width, 4).float() / width)
        direction = torch.rand(spec.sets, 1) * 2 * math.pi + torch.tensor([0.0, math.pi / 2]).repeat_interleave(width // 4)
        self.frequencies = nn.Parameter(torch.stack([direction.cos(), direction.sin()]) * magnitude.repeat(2))

    def rotate(self, x: Tensor, step: Step) -> Tensor:
        each = self._heads_per_set(x.shape[2])
        cos, sin = tables(self.angle(step).repeat_interleave(each, 2), self.spec.layout)
        return turn(x, cos.to(x.dtype), sin.to(x.dtype), self.spec.layout)

    def angle(self, step: Step) -> Tensor:
        """[B, T, sets, width/2], at least fp32."""
        places = step.coordinates(2).clamp(min=0)
        wide = self.frequencies.to(torch.promote_types(self.frequencies.dtype, torch.float32))
        return torch.einsum("bta,asd->btsd", places.to(wide.dtype), wide)

    def _heads_per_set(self, heads: int) -> int:
        if heads % self.spec.sets:
            raise ValueError(f"rope_mixed has {self.spec.sets} sets of frequencies, which {heads} key/value heads cannot share evenly")
        return heads // self.spec.sets
