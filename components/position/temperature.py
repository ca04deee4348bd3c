"""Attention temperature that grows with the position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.contracts import Position, PositionModule, Step
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(Position, "temperature", source="Nakanishi 2025, arXiv:2501.19399; Llama 4 and Ministral 3 model code", example={"floor": 4})
@dataclass(frozen=True, kw_only=True)
class Temperature(Position):
    """Multiplies queries by 1 + scale * log(1 + floor((position + offset) / floor)), on top of another encoding.

    inner: the encoding of positions: none in Llama 4's layers without rope, rope in Ministral 3. offset: 1 in Llama 4, 0 in
    Ministral 3. floor: positions (Llama 4: 8192; Ministral 3: the trained context) after which the factor first grows.
    """

    inner: Position = default(Position, "none")
    scale: float = 0.1
    floor: int = 8192
    offset: int = 1

    @property
    def has_bias(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.has_bias

    def problems(self, width: int, heads: int) -> Iterator[tuple[str, str]]:
        if self.floor < 1:
            yield "floor", f"must be at least 1, got {self.floor}"

    def children(self, width: int, heads: int) -> dict[str, Child]:
        return {"inner": Child(self.inner, (width, heads))}

    def build(self, width: int, heads: int) -> PositionModule:
        return TemperatureModule(self, width, heads)


class TemperatureModule(PositionModule):
    def __init__(self, spec: Temperature, width: int, heads: int):
        super().__init__()
        self.spec = spec
        self.key = f"temperature {spec.key}"  # worked out here, where a compiler does not look
        self.inner: PositionModule = spec.inner.build(width, heads)
        self.logit_scale = self.inner.logit_scale

    def rotate(self, x: Tensor, step: Step) -> Tensor:
        return self.inner.rotate(x, step)

    def bias(self, qpos: Tensor, kpos: Tensor) -> Tensor | None:
        return self.inner.bias(qpos, kpos)

    def temper(self, q: Tensor, step: Step) -> Tensor:
        factor = step.once(self.key, lambda: self.factor(step.pos))
        return q * factor.to(q.dtype)

    def factor(self, pos: Tensor) -> Tensor:
        """[B, T] -> [B, T, 1, 1] fp32; 1 for padding."""
        turns = torch.floor((pos.clamp(min=0).float() + self.spec.offset) / self.spec.floor)
        return (1 + self.spec.scale * torch.log1p(turns))[..., None, None]
