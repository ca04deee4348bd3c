"""Caches that forget what no later token will look at: a window of the last tokens, with or without the first ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zoo.components.cache._columns import ColumnCache, Columns
from zoo.components.contracts import Slot


def most(window: int, sinks: int, room: int) -> int:
    """Tokens that a row comes to hold before it forgets some, with ``room`` for as many again."""
    return sinks + window - 1 + 2 * room


class WindowCache(ColumnCache):
    """Each group keeps the first ``sinks`` tokens, those of the last ``window`` and ``room`` more.

    windows: of each group, None keeps everything. Within the room tokens can be added without moving any, and cut back after they
    were committed. Longer calls grow the buffers until their commit.
    """

    def __init__(self, layers: Sequence[Mapping[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device,
                 windows: Mapping[tuple[int, ...], int | None], sinks: int, room: int):  # fmt: skip
        super().__init__(layers, rows, dtype, device, groups=list(windows))
        self.windows = [next(w for group, w in windows.items() if layer in group) for layer in map(min, (s.layers for s in self.stores))]
        self.sinks, self.room = sinks, room

    def _settle(self, kept: Sequence[int]) -> None:
        for store, window in zip(self.stores, self.windows, strict=True):
            if window is not None and max(store.count, default=0) > most(window, self.sinks, self.room):
                self._forget(store, self.sinks + window - 1 + self.room)

    def _forget(self, store: Columns, left: int) -> None:
        count = [min(n, left) for n in store.count]
        for row, (n, c) in enumerate(zip(store.count, count, strict=True)):
            if c < n:
                self.floor[row] = max(self.floor[row], self.length[row] - self.room)
        store.keep(ends(torch.tensor(store.count, device=self.device), self.sinks, left), count, room=2 * self.room)


def ends(count: Tensor, first: int, most: int) -> Tensor:
    """The first ``first`` and the last of ``count`` [rows] columns, ``most`` together: [rows, most], -1 where there are fewer."""
    column = torch.arange(most, device=count.device)[None]
    gap = (count[:, None] - most).clamp(min=0)
    index = torch.where(column < first, column, column + gap)
    return index.masked_fill(index >= count[:, None], -1)
