"""Attention with linear biases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.contracts import Position, PositionModule
from zoo.components.registry import part


@part(Position, "alibi", source="Press et al. 2021, arXiv:2108.12409, section 3; other head counts: the authors' code, as in BLOOM")
@dataclass(frozen=True, kw_only=True)
class ALiBi(Position):
    """Subtracts slope * |distance| from the logits, with a fixed slope for each head from 2^(-max_bias/heads) to 2^-max_bias.

    scale: multiplies the slopes (Falcon: head_dim ** -0.5). Where the number of heads is no power of two, the slopes of the next power
    are taken, every second one first.
    """

    has_bias = True

    max_bias: float = 8.0
    scale: float = 1.0

    def problems(self, width: int, heads: int) -> Iterator[tuple[str, str]]:
        for name in ("max_bias", "scale"):
            if getattr(self, name) <= 0:
                yield name, f"must be positive, got {getattr(self, name)}"

    def slopes(self, heads: int) -> list[float]:
        power = 2 ** math.ceil(math.log2(heads))
        falling = [self.scale * 2 ** (-self.max_bias * (i + 1) / power) for i in range(power)]
        return falling if power == heads else [*falling[1::2], *falling[::2]][:heads]

    def build(self, width: int, heads: int) -> PositionModule:
        return ALiBiModule(self, heads)


class ALiBiModule(PositionModule):
    """Holds no tensors, so that no load or cast can spoil the slopes."""

    def __init__(self, spec: ALiBi, heads: int):
        super().__init__()
        self.slopes = spec.slopes(heads)

    def bias(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        """[B, H, T, S] fp32."""
        distance = (qpos[:, None, :, None] - kpos[:, None, None, :]).abs().float()
        return distance * -torch.tensor(self.slopes, device=qpos.device)[:, None, None]
