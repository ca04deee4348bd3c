"""Flash decoding++: parts that need not wait for each other's maximum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._softmax import SoftmaxKernel
from zoo.components.ops.attention import split_unified
from zoo.components.registry import part


@part(Kernel, "split_unified", source="Hong et al. 2023, arXiv:2311.01282 (FlashDecoding++), section 3", example={"parts": 3, "reach": 1.0})
@dataclass(frozen=True, kw_only=True)
class SplitUnified(Kernel):
    """As split, but all parts subtract the same number, so they are added without rescaling; far rows are computed again.

    center: the number, from the statistics of a model's logits. reach: a row whose largest logit is further from the center is
    computed again with maxima; in fp32 nothing is lost below about 80.
    """

    softmax = True

    parts: int = 8
    center: float = 0.0
    reach: float = 40.0
    graph_safe = False

    def problems(self, projection: Projection) -> Iterator[tuple[str, str]]:
        if self.parts < 1:
            yield "parts", f"must be at least 1, got {self.parts}"
        if not 0 < self.reach <= 80:
            yield "reach", f"must lie in (0, 80], beyond which fp32 exponentials overflow, got {self.reach}"

    def build(self, projection: Projection) -> nn.Module:
        return SoftmaxKernel(partial(split_unified, parts=self.parts, center=self.center, reach=self.reach))
