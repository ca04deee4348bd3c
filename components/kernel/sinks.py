"""Attention with learned sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Kernel, Operands, Pattern, PositionModule, Projection, Step, View
from zoo.components.kernel._softmax import heads_last, scene
from zoo.components.ops.softmax import with_sink
from zoo.components.ops.softmax.running import product
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Kernel, "sinks", source="gpt-oss, arXiv:2508.10925, section 2.2 (a learned bias in the softmax's denominator)")
@dataclass(frozen=True, kw_only=True)
class Sinks(Kernel):
    """Each head has a learned logit beside its keys that takes a share of the softmax and adds nothing to the output."""

    masks = True

    def own_tensors(self, projection: Projection) -> dict[str, TensorInfo]:
        return {"sink": TensorInfo((projection.heads,))}

    def build(self, projection: Projection) -> nn.Module:
        return SinksKernel(projection.heads)


class SinksKernel(nn.Module):
    """sink [H]. It starts at 0, as "softmax off by one"."""

    def __init__(self, heads: int):
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(heads))

    def forward(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
        s = scene(a, view, step, pattern, position)
        x = s.logits()
        weights = with_sink(x, self.sink.to(x.dtype).view(s.k.shape[1], -1, 1))
        return heads_last(product(weights, s.v), a.v)
