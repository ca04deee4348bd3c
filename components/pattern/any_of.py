"""What at least one of several patterns allows."""

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
    "any_of",
    source="composition of visibility predicates, as or_masks of torch.nn.attention.flex_attention",
    example={"patterns": [{"name": "window", "size": 3}, {"name": "dilated", "size": 3, "dilation": 4}]},
)
@dataclass(frozen=True, kw_only=True)
class AnyOf(Pattern):
    """A key is seen where one of ``patterns`` allows it."""

    patterns: tuple[Pattern, ...]

    @property
    def causal(self) -> bool:
        return all(p.causal for p in self.patterns)

    @property
    def whole(self) -> bool:
        """Windows of one direction nest, so the widest is all that is seen; a full pattern covers everything."""
        return all(p.whole for p in self.patterns)

    @property
    def segmented(self) -> bool:
        return any(p.segmented for p in self.patterns)

    @property
    def separates(self) -> bool:
        return all(p.separates for p in self.patterns)

    @property
    def window(self) -> int | None:
        spans = [p.window for p in self.patterns]
        return None if None in spans else max(s for s in spans if s is not None)

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.patterns:
            yield "patterns", "needs at least one pattern"

    def children(self) -> dict[str, Child]:
        return {f"patterns.{i}": Child(p) for i, p in enumerate(self.patterns)}

    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        return reduce(Tensor.__or__, (p.see(qpos, kpos) for p in self.patterns))

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return reduce(Tensor.__or__, (p.allows(q, k) for p in self.patterns))
