"""Attention as it is written in the paper: the whole score matrix, then a softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import Kernel, Operands, Pattern, PositionModule, Projection, Step, View
from zoo.components.registry import part


@part(Kernel, "eager", source="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1")
@dataclass(frozen=True, kw_only=True)
class Eager(Kernel):
    """softmax(q k^T * scale + bias) v with all scores in memory; the reference for every other kernel."""

    softmax = True
    masks = True

    def build(self, projection: Projection) -> nn.Module:
        return EagerKernel()


class EagerKernel(nn.Module):
    """Softmax in fp32. Works on [B, G, H/G, T, D], so keys and values are never repeated."""

    def forward(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
        groups = a.k.shape[2]
        q = a.q.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
        k, v = a.k.transpose(1, 2)[:, :, None], a.v.transpose(1, 2)[:, :, None]
        scores = (q @ k.mT).float() * (a.scale * position.logit_scale)
        bias = position.bias(step.pos, view.kpos)
        if bias is not None:
            scores = scores + bias.unflatten(1, (groups, -1))
        keep = pattern.mask(step, view)[:, :, None]
        weights = scores.masked_fill(~keep, float("-inf")).softmax(-1).masked_fill(~keep, 0.0)  # a row that sees nothing is 0
        return (weights.to(v.dtype) @ v).permute(0, 3, 1, 2, 4).flatten(2, 3)
