"""NTK-aware scaling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import RopeScaling
from zoo.components.ops.rotary import frequencies
from zoo.components.registry import part


@part(
    RopeScaling,
    "ntk",
    source="bloc97 2023 (NTK-aware scaled RoPE), as in Peng et al. 2023, arXiv:2309.00071, section 3.1",
    example={"factor": 4.0},
)
@dataclass(frozen=True, kw_only=True)
class NTK(RopeScaling):
    """A larger base, factor^(width/(width-2)) times: the slowest frequency is divided by ``factor``, the fastest is kept."""

    factor: float

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        if self.factor <= 0:
            yield "factor", f"must be positive, got {self.factor}"
        if width < 4:
            yield "factor", f"a changed base needs more than one frequency, the rotated width is {width}"

    def frequencies(self, base: float, width: int, length: Tensor | None) -> Tensor:
        return frequencies(base * self.factor ** (width / (width - 2)), width)
