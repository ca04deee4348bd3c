"""The first tokens and the last ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from zoo.components.cache._window import WindowCache, most
from zoo.components.contracts import CachePolicy, Call, Pattern, Slot, Step, View
from zoo.components.registry import part
from zoo.components.spec import load


@part(
    CachePolicy,
    "sinks_recent",
    source="StreamingLLM: Xiao et al. 2023, arXiv:2309.17453, section 3.2",
    example={"sinks": 1, "window": 4, "room": 2},
)
@dataclass(frozen=True, kw_only=True)
class SinksRecent(CachePolicy):
    """A token sees the first ``sinks`` positions and the last ``window``, its own included; the rest is forgotten.

    What a token sees depends on its position alone, so a text may be cut in any way. Tokens keep their own positions; the paper
    counts positions within the cache, which differs by the distance to the sinks once tokens are forgotten. room: see ``sliding``.
    """

    sinks: int = 4
    window: int = 1020
    room: int = 64
    exact = False
    forgets = True

    def problems(self) -> Iterator[tuple[str, str]]:
        for name, least in (("sinks", 0), ("window", 1), ("room", 1)):
            if getattr(self, name) < least:
                yield name, f"must be at least {least}, got {getattr(self, name)}"

    def kept(self, tokens: int, slots: Mapping[str, Slot]) -> int:
        return min(tokens, most(self.window, self.sinks, self.room))

    def seen(self, call: Call, pattern: Pattern, slots: Mapping[str, Slot]) -> Call:
        return super().seen(call, _narrowed(pattern, self.sinks, self.window), slots)

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> SinksRecentCache:
        windows = {tuple(range(len(layers))): self.window}
        return SinksRecentCache(layers, rows, dtype, device, windows, self.sinks, self.room)


class SinksRecentCache(WindowCache):
    def extend(self, layer: int, new: Mapping[str, Tensor], step: Step, slots: Mapping[str, Slot]) -> View:
        view = super().extend(layer, new, step, slots)
        view.narrow = self._narrow
        return view

    def _narrow(self, pattern: Pattern) -> Pattern:
        window = self.windows[0] if self.windows else None
        return pattern if window is None else _narrowed(pattern, self.sinks, window)


@lru_cache
def _narrowed(pattern: Pattern, sinks: int, window: int) -> Pattern:
    return pattern & load(Pattern, {"name": "sinks", "count": sinks, "size": window})
