"""NTK-by-parts interpolation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import RopeScaling
from zoo.components.ops.rotary import frequencies
from zoo.components.registry import part


@part(
    RopeScaling,
    "ntk_by_parts",
    source="Peng et al. 2023, arXiv:2309.00071, section 3.2, definition 2",
    example={"factor": 4.0, "context": 64},
)
@dataclass(frozen=True, kw_only=True)
class NTKByParts(RopeScaling):
    """Channels that turn often within ``context`` keep their frequency, those that turn rarely have it divided by ``factor``.

    alpha, beta: turns below which all and above which nothing is divided; between them the share grows linearly with the turns.
    YaRN's code has the ramp over channels instead and adds a temperature: ``yarn``.
    """

    factor: float
    context: int
    alpha: float = 1.0
    beta: float = 32.0

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        if self.factor <= 0:
            yield "factor", f"must be positive, got {self.factor}"
        if not 0 <= self.alpha < self.beta:
            yield "alpha", f"must lie in 0..beta ({self.beta}), got {self.alpha}"

    def frequencies(self, base: float, width: int, length: Tensor | None) -> Tensor:
        plain = frequencies(base, width)
        turns = self.context * plain / (2 * math.pi)
        keep = ((turns - self.alpha) / (self.beta - self.alpha)).clamp(0, 1)
        return (1 - keep) * plain / self.factor + keep * plain
