"""Attention whose logits are squashed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Ask, Kernel, Operands, Pattern, PositionModule, Projection, Step, View
from zoo.components.kernel._softmax import heads_last, scene
from zoo.components.ops.softmax import safe
from zoo.components.ops.softmax.running import product
from zoo.components.registry import part


@part(Kernel, "softcap", source="Gemma 2, arXiv:2408.00118, section 2 (logit soft-capping, 50.0)", example={"cap": 2.0})
@dataclass(frozen=True, kw_only=True)
class SoftCap(Kernel):
    """softmax(cap * tanh(q k^T * scale / cap)) v: no logit passes ``cap`` in size."""

    cap: float = 50.0
    masks = True

    def problems(self, projection: Projection) -> Iterator[tuple[str, str]]:
        if self.cap <= 0:
            yield "cap", f"must be positive, got {self.cap}"

    def refuses(self, ask: Ask) -> list[str]:
        return super().refuses(ask) + (["takes no position bias: capped before or after it is added, results differ"] if ask.bias else [])

    def build(self, projection: Projection) -> nn.Module:
        return SoftCapKernel(self.cap)


class SoftCapKernel(nn.Module):
    def __init__(self, cap: float):
        super().__init__()
        self.cap = cap

    def forward(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
        s = scene(a, view, step, pattern, position)
        capped = (torch.tanh(s.logits() / self.cap) * self.cap).masked_fill(~s.keep, -torch.inf)
        return heads_last(product(safe(capped), s.v), a.v)
