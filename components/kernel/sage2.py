"""SageAttention 2, emulated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._softmax import SoftmaxKernel
from zoo.components.ops.sage import sage2
from zoo.components.registry import part


@part(Kernel, "sage2", source="Zhang et al. 2024, arXiv:2411.10958")
@dataclass(frozen=True, kw_only=True)
class Sage2(Kernel):
    """int8 or int4 queries and keys with a scale per GPU thread, both smoothed; FP8 weights and values.

    bits: of q and k. Gradients are those of the unrounded product. Emulation: for accuracy, not for speed.
    """

    bits: Literal[4, 8] = 8

    @property
    def rounding(self) -> float:
        return 0.5 if self.bits == 4 else 0.1

    def build(self, projection: Projection) -> nn.Module:
        return SoftmaxKernel(partial(sage2, bits=self.bits))
