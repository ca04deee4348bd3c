"""Rotary position encoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zoo.components.contracts import Position, PositionModule, RopeScaling, Step
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
    layout: Literal["half", "interleaved"] = "half"
    width: int | None = None
    scaling: RopeScaling = default(RopeScaling, "none")

    def problems(self, width: int, heads: int) -> Iterator[tuple[str, str]]:
        turned = self.width or width
        if turned % 2 or turned > width:
            yield "width", f"rope turns an even number of at most {width} channels, got {turned}"
        if self.theta <= 0:
            yield "theta", f"must be positive, got {self.theta}"

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
        if self.width == x.shape[-1]:
            return self.turn(x, cos, sin)
        head, rest = x.split([self.width, x.shape[-1] - self.width], -1)
        return torch.cat([self.turn(head, cos, sin), rest], -1)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.addcmul(x * cos, self.partner(x), sin)

    def partner(self, x: Tensor) -> Tensor:
        """For each channel, the other one of its pair."""
        if self.spec.layout == "half":
            return x.roll(self.width // 2, -1)
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)

    def tables(self, step: Step, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [B, T, 1, width]: a pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
        pos = step.pos.clamp(min=0)  # padding is turned by nothing
        length = pos.amax(-1) + 1 if self.spec.scaling.uses_length else None
        frequency = self.spec.scaling.frequencies(self.spec.theta, self.width, length).to(pos.device)
        angle = pos[..., None].float() * (frequency[:, None] if frequency.dim() == 2 else frequency)
        cos, sin = (f(angle) * self.spec.scaling.attention_factor for f in (torch.cos, torch.sin))
        if self.spec.layout == "half":
            cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        else:
            cos, sin = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
        return cos[:, :, None].to(dtype), sin[:, :, None].to(dtype)
