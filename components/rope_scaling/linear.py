"""Position interpolation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import RopeScaling
from zoo.components.ops.rotary import frequencies
from zoo.components.registry import part
from zoo.components.rope_scaling._checks import positive


@part(RopeScaling, "linear", source="Chen et al. 2023, arXiv:2306.15595", example={"factor": 4.0})
@dataclass(frozen=True, kw_only=True)
class Linear(RopeScaling):
    """All frequencies divided by ``factor``, which squeezes positions into the trained range."""

    factor: float

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        yield from positive(self, "factor")

    def frequencies(self, base: float, width: int, length: Tensor | None) -> Tensor:
        return frequencies(base, width) / self.factor
