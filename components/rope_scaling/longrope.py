"""LongRoPE."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.contracts import RopeScaling
from zoo.components.registry import part
from zoo.components.rope_scaling._checks import positive


@part(
    RopeScaling,
    "longrope",
    source="Ding et al. 2024, arXiv:2402.13753; Phi-3 model code, as in transformers rope type 'longrope'",
    example={"short": [1.0, 1.1, 1.2, 1.3], "long": [1.0, 2.0, 3.0, 4.0], "context": 8, "factor": 4.0},
)
@dataclass(frozen=True, kw_only=True)
class LongRope(RopeScaling):
    """Each frequency is divided by a factor found by search: one of ``short``, or of ``long`` in rows longer than ``context``.

    factor: trained context over ``context``; cos and sin are scaled by sqrt(1 + log(factor) / log(context)) or, where given, by
    ``attention_scale``. Keys that are already cached keep the frequencies of the length at which they were written.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    context: int
    factor: float
    attention_scale: float | None = None
    uses_length = True

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        yield from positive(self, "factor")
        for name in ("short", "long"):
            if not all(math.isfinite(f) and f > 0 for f in getattr(self, name)):
                yield name, "must be positive numbers"
            if len(getattr(self, name)) != width // 2:
                yield name, f"needs a factor for each of {width // 2} frequencies, got {len(getattr(self, name))}"
        if self.context < 2:
            yield "context", f"must be at least 2, got {self.context}"

    def frequencies(self, base: float, width: int, length: Tensor | None) -> Tensor:
        exponent = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        short, long = (1.0 / (torch.tensor(factors) * base**exponent) for factors in (self.short, self.long))
        if length is None:
            return short
        return torch.where(length[:, None] > self.context, long.to(length.device), short.to(length.device))

    @property
    def attention_factor(self) -> float:
        if self.attention_scale is not None:
            return self.attention_scale
        return math.sqrt(1 + math.log(self.factor) / math.log(self.context)) if self.factor > 1 else 1.0
