"""The first tokens and a causal sliding window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import Pattern
from zoo.components.registry import part


@part(Pattern, "sinks", source="Xiao et al. 2023, arXiv:2309.17453, section 3.2 (StreamingLLM)", example={"count": 2, "size": 4})
@dataclass(frozen=True, kw_only=True)
class Sinks(Pattern):
    """A token sees the row's first ``count`` positions, itself and the ``size - 1`` tokens before it; nothing after it.

    The paper gives keys new positions inside its cache; here they keep their own.
    """

    count: int
    size: int
    causal = True

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.count < 0:
            yield "count", f"must not be negative, got {self.count}"
        if self.size < 1:
            yield "size", f"a window holds at least the token itself, got {self.size}"

    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        return (kpos <= qpos) & ((kpos < self.count) | (qpos - kpos < self.size))
