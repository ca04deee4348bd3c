"""The gated feed-forward part of gpt-oss: clamped, with a sharper gate and an offset."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import MLP, Linear, attach
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(MLP, "clamped", source="OpenAI 2025 (gpt-oss), arXiv:2508.10925; transformers GptOssExperts", example={"hidden": 24})
@dataclass(frozen=True, kw_only=True)
class Clamped(MLP):
    """down((clamp(up x) + 1) * g * sigmoid(alpha g)) with g = gate x, at most ``limit``.

    up is clamped on both sides, the gate from above only. alpha: 1.702 makes the gate an approximation of gelu.
    """

    hidden: int
    alpha: float = 1.702
    limit: float = 7.0
    bias: bool = True
    gate: Linear = default(Linear, "dense")
    up: Linear = default(Linear, "dense")
    down: Linear = default(Linear, "dense")

    def children(self, width: int) -> dict[str, Child]:
        return {
            "gate": Child(self.gate, (width, self.hidden, self.bias)),
            "up": Child(self.up, (width, self.hidden, self.bias)),
            "down": Child(self.down, (self.hidden, width, self.bias)),
        }

    def build(self, width: int) -> nn.Module:
        return ClampedMLP(self, width)


class ClampedMLP(nn.Module):
    """[..., M] -> [..., M]."""

    gate: nn.Module
    up: nn.Module
    down: nn.Module

    def __init__(self, spec: Clamped, width: int):
        super().__init__()
        attach(self, spec.children(width))
        self.alpha, self.limit = spec.alpha, spec.limit

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).clamp(max=self.limit)
        up = self.up(x).clamp(-self.limit, self.limit)
        return self.down((up + 1) * gate * torch.sigmoid(self.alpha * gate))
