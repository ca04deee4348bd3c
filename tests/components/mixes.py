"""Which mixers the contract suite builds: every accepted pair of choices on two axes, the other axes at their plainest.

The full product grows with the power of the number of parts; faults come from one part or from two that meet.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache

import torch

from zoo.components import registry
from zoo.components.spec import Spec, check
from zoo.model import Mixer, MixerSpec

M = 32
PLAIN = {"projection": "gqa", "position": "rope", "pattern": "causal", "kernel": "eager"}


@dataclass(frozen=True)
class Mix:
    """One choice on each axis, by name."""

    projection: str
    position: str
    pattern: str
    kernel: str

    def __str__(self) -> str:
        return f"{self.projection}-{self.position}-{self.pattern}-{self.kernel}"

    @property
    def spec(self) -> MixerSpec:
        return MixerSpec(**{axis: small(axis, getattr(self, axis)) for axis in PLAIN})  # pyright: ignore[reportArgumentType]

    @property
    def accepted(self) -> bool:
        return accepts(self)

    def build(self, dtype: torch.dtype = torch.float32) -> Mixer:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.spec.build(M, 0).to(dtype).eval()

    def with_(self, **choice: str) -> Mix:
        return replace(self, **choice)


@cache
def accepts(mix: Mix) -> bool:
    return not check(mix.spec, M, 0)


@cache
def small(axis: str, name: str) -> Spec:
    return registry.get(axis, name).small()


@cache
def names(axis: str) -> list[str]:
    """The part names of an axis that can run here, the plainest first."""
    found = [n for n in registry.names(axis) if torch.cuda.is_available() or "gpu" not in registry.get(axis, n).needs]
    return sorted(found, key=lambda n: (n != PLAIN[axis], n))


def completed(**fixed: str) -> Mix | None:
    """The plainest accepted mix with these choices, or None: the parts refuse each other whatever the rest."""
    free = [axis for axis in PLAIN if axis not in fixed]
    options = itertools.product(*(names(axis) for axis in free))
    ranked = sorted(options, key=lambda o: sum(n != PLAIN[a] for a, n in zip(free, o, strict=True)))
    mixes = (Mix(**fixed, **dict(zip(free, o, strict=True))) for o in ranked)
    return next((m for m in mixes if m.accepted), None)


@cache
def pairs() -> list[Mix]:
    """Every pair of choices on two axes once, where the parts accept each other."""
    found: dict[Mix, None] = {}
    for a, b in itertools.combinations(PLAIN, 2):
        for x, y in itertools.product(names(a), names(b)):
            mix = completed(**{a: x, b: y})
            if mix:
                found[mix] = None
    return list(found)


@cache
def singles() -> list[Mix]:
    """Every part once, in the plainest mix that accepts it."""
    mixes = (completed(**{axis: name}) for axis in PLAIN for name in names(axis))
    return list(dict.fromkeys(m for m in mixes if m))
