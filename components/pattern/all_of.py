"""What every one of several patterns allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from zoo.components.contracts import Pattern, Tokens
from zoo.components.registry import part
from zoo.components.spec import Child


@part(
    Pattern,
    "all_of",
    source="composition of visibility predicates, as and_masks of torch.nn.attention.flex_attention",
    example={"patterns": [{"name": "causal"}, {"name": "chunked", "size": 8}, {"name": "window", "size": 3}]},
)
@dataclass(frozen=True, kw_only=True)
class AllOf(Pattern):
    """A key is seen where all ``patterns`` allow it."""

    patterns: tuple[Pattern, ...]

    @property
    def causal(self) -> bool:
        return any(p.causal for p in self.patterns)

    @property
    def whole(self) -> bool:
        return all(p.whole for p in self.patterns)

    @property
    def segmented(self) -> bool:
        return any(p.segmented for p in self.patterns)

    @property
    def separates(self) -> bool:
        return any(p.separates for p in self.patterns)

    @property
    def window(self) -> int | None:
        return min((p.window for p in self.patterns if p.window is not None), default=None)

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.patterns:
            yield "patterns", "needs at least one pattern"

    def children(self) -> dict[str, Child]:
        return {f"patterns.{i}": Child(p) for i, p in enumerate(self.patterns)}

    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        return reduce(Tensor.__and__, (p.see(qpos, kpos) for p in self.patterns))

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return reduce(Tensor.__and__, (p.allows(q, k) for p in self.patterns))
