"""A ring for layers with a window: what the window has left behind is forgotten."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from zoo.components.cache._window import WindowCache, most
from zoo.components.contracts import Ask, CachePolicy, Slot
from zoo.components.registry import part


@part(CachePolicy, "sliding", source="rolling buffer: Jiang et al. 2023, arXiv:2310.06825, section 2", example={"room": 2})
@dataclass(frozen=True, kw_only=True)
class Sliding(CachePolicy):
    """Layers whose pattern has a window keep that window and ``room`` tokens; other layers keep everything. Nothing seen is lost.

    room: tokens of a draft that fit without growing, and that can be cut back after a commit.
    """

    room: int = 64
    forgets = True

    def refuses(self, ask: Ask) -> list[str]:
        return super().refuses(ask) if ask.pattern.window is not None else []  # other layers keep everything

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.room < 1:
            yield "room", f"the next token needs room, got {self.room}"

    def kept(self, tokens: int, slots: Mapping[str, Slot]) -> int:
        window = _window(slots)
        return tokens if window is None else min(tokens, most(window, 0, self.room))

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> WindowCache:
        members: defaultdict[int | None, list[int]] = defaultdict(list)
        for layer, slots in enumerate(layers):
            members[_window(slots)].append(layer)
        windows = {tuple(group): window for window, group in members.items()}
        return WindowCache(layers, rows, dtype, device, windows, sinks=0, room=self.room)


def _window(slots: Mapping[str, Slot]) -> int | None:
    """The widest window of a layer's token slots, None where one of them has none."""
    windows = [s.window for s in slots.values() if s.kind == "token"]
    return None if None in windows else max((w for w in windows if w is not None), default=None)
