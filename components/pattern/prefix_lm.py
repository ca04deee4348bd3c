"""A prefix that sees itself whole, then causal text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import Pattern
from zoo.components.registry import part


@part(Pattern, "prefix_lm", source="Raffel et al. 2019, arXiv:1910.10683, section 3.2.1 (prefix LM)", example={"length": 4})
@dataclass(frozen=True, kw_only=True)
class PrefixLM(Pattern):
    """The first ``length`` positions are seen by every token, later ones only by what follows.

    For prefixes of a length of their own per row give the prefix tokens a segment and compose ``any_of: [causal, document]``.
    A cache needs the whole prefix in one call.
    """

    length: int

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.length < 0:
            yield "length", f"must not be negative, got {self.length}"

    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        return (kpos <= qpos) | (kpos < self.length)
