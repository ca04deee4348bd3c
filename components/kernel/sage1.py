"""SageAttention 1, emulated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._softmax import SoftmaxKernel
from zoo.components.ops.sage import sage1
from zoo.components.registry import part


@part(Kernel, "sage1", source="Zhang et al. 2024, arXiv:2410.02367; kernels: sageattention 1.0.6")
@dataclass(frozen=True, kw_only=True)
class Sage1(Kernel):
    """int8 queries and keys with a scale per tile, keys less their mean; fp16 weights and values.

    Gradients are those of the unrounded product. Emulation: for accuracy, not for speed.
    """

    rounding = 0.03

    def build(self, projection: Projection) -> nn.Module:
        return SoftmaxKernel(sage1)
