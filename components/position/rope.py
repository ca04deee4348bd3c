"""Rotary position encoding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.contracts import Position, PositionModule, RopeScaling, Step
from zoo.components.ops.rotary import Layout, tables, turn
from zoo.components.registry import part
from zoo.components.spec import default


@part(Position, "rope", source="Su et al. 2021, arXiv:2104.09864, section 3.4.2")
@dataclass(frozen=True, kw_only=True)
class Rope(Position):
    """Turns pairs of channels by position * theta^(-2i/width).

    layout: ``half`` pairs channel i with i + width/2 (Hugging Face), ``interleaved`` pairs 2i with 2i+1 (the paper).
    width: how many leading channels are turned; None is all. scaling: what happens beyond the trained context.
    """

    theta: float = 10_000.0
    layout: Layout = "half"
    width: int | None = None
    scaling: RopeScaling = default(RopeScaling, "none")

    def problems(self, width: int, heads: int) -> Iterator[tuple[str, str]]:
        turned = self.width or width
        if turned % 2 or turned > width:
            yield "width", f"rope turns an even number of at most {width} channels, got {turned}"
        if not (math.isfinite(self.theta) and self.theta > 0):
            yield "theta", f"must be a positive number, got {self.theta}"
        for name, why in self.scaling.problems(turned):
            yield f"scaling.{name}", why

    def build(self, width: int, heads: int) -> PositionModule:
        return RopeModule(self, self.width or width)


class RopeModule(PositionModule):
    """Holds no tensors: tables are made anew in fp32 for each call, so no load or cast can spoil them, and layers share them."""

    def __init__(self, spec: Rope, width: int):
        super().__init__()
        self.spec, self.width = spec, width
        self.logit_scale = spec.scaling.logit_scale
        self.key = f"{spec.key} {width}"

    def rotate(self, x: Tensor, step: Step) -> Tensor:
        cos, sin = step.once(f"{self.key} {x.dtype}", lambda: self.tables(step, x.dtype))
        return turn(x, cos, sin, self.spec.layout)

    def tables(self, step: Step, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [B, T, 1, width]."""
        cos, sin = tables(self.angle(step), self.spec.layout, self.spec.scaling.attention_factor)
        return cos[:, :, None].to(dtype), sin[:, :, None].to(dtype)

    def angle(self, step: Step) -> Tensor:
        """[B, T, width/2] fp32."""
        return step.pos.clamp(min=0)[..., None].float() * self.frequencies(step)  # padding is turned by nothing

    def frequencies(self, step: Step) -> Tensor:
        """[width/2], or [B, 1, width/2] where they depend on the length of each row."""
        length = step.pos.amax(-1).clamp(min=0) + 1 if self.spec.scaling.uses_length else None
        frequency = self.spec.scaling.frequencies(self.spec.theta, self.width, length).to(step.pos.device)
        return frequency[:, None] if frequency.dim() == 2 else frequency
