"""SageAttention 2++, emulated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._softmax import SoftmaxKernel
from zoo.components.ops.sage import sage2pp
from zoo.components.registry import part


@part(Kernel, "sage2pp", source="Zhang et al. 2025, arXiv:2505.21136")
@dataclass(frozen=True, kw_only=True)
class Sage2PP(Kernel):
    """As sage2 with fp16 sums of the FP8 products, for which values keep to a narrow range.

    bits: of q and k. Gradients are those of the unrounded product. Emulation: for accuracy, not for speed.
    """

    bits: Literal[4, 8] = 8

    @property
    def rounding(self) -> float:
        return 0.5 if self.bits == 4 else 0.1

    def build(self, projection: Projection) -> nn.Module:
        return SoftmaxKernel(partial(sage2pp, bits=self.bits))
