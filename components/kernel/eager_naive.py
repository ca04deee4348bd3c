"""Attention with the textbook softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._softmax import SoftmaxKernel
from zoo.components.ops.attention import naive_attention
from zoo.components.registry import part


@part(Kernel, "eager_naive", source="Vaswani et al. 2017, arXiv:1706.03762, equation 1, its softmax taken literally")
@dataclass(frozen=True, kw_only=True)
class EagerNaive(Kernel):
    """exp(x) / sum exp(x) with no maximum subtracted, for teaching: logits above 88 become inf and the output NaN."""

    softmax = True
    masks = True

    def build(self, projection: Projection) -> nn.Module:
        return SoftmaxKernel(naive_attention)
