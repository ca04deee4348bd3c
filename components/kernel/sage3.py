"""SageAttention 3, emulated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._softmax import SoftmaxKernel
from zoo.components.ops.sage import sage3
from zoo.components.registry import part


@part(Kernel, "sage3", source="Zhang et al. 2025, arXiv:2505.11594")
@dataclass(frozen=True, kw_only=True)
class Sage3(Kernel):
    """FP4 queries, keys, weights and values with an FP8 scale per 16 (NVFP4), queries and keys smoothed.

    Gradients are those of the unrounded product. Emulation: for accuracy, not for speed.
    """

    rounding = 0.4

    def build(self, projection: Projection) -> nn.Module:
        return SoftmaxKernel(sage3)
