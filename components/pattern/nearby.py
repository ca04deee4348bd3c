"""A sliding window in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import Pattern
from zoo.components.registry import part


@part(
    Pattern, "nearby", source="Beltagy et al. 2020, arXiv:2004.05150, section 3.1; Warner et al. 2024 (ModernBERT), arXiv:2412.13663",
    example={"reach": 3},
)  # fmt: skip
@dataclass(frozen=True, kw_only=True)
class Nearby(Pattern):
    """A token sees itself and the ``reach`` tokens on either side (ModernBERT: half of its ``local_attention``)."""

    reach: int

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.reach < 0:
            yield "reach", f"must not be negative, got {self.reach}"

    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        return (qpos - kpos).abs() <= self.reach
