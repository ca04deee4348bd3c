"""Tokens in columns: one buffer [rows, capacity, ...] for each stored tensor, valid tokens packed from column 0 in each row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from zoo.components.cache._ledger import TokenCache, token_slots
from zoo.components.contracts import Slot, Step

GROWTH = 256  # columns; buffers grow by at least this and by half their size, so that appending stays linear
Place = tuple[slice, slice] | tuple[Tensor, Tensor]


class Buffer:
    """One slot of one layer, exactly: ``parts`` has one tensor [rows, capacity, *slot shape]. Other ways of storing derive from it."""

    def __init__(self, slot: Slot, dtype: torch.dtype, rows: int, device: torch.device):
        self.dtype, self.width = slot.dtype or dtype, slot.shape[-1]
        self.parts = {"value": torch.empty(rows, 0, *slot.shape, dtype=self.dtype, device=device)}

    def write(self, place: Place, new: Tensor) -> None:
        self.parts["value"][place] = new

    def read(self, columns: int) -> Tensor:
        return self.parts["value"][:, :columns]

    def resize(self, columns: int) -> None:
        self.parts = {n: resized(x, columns) for n, x in self.parts.items()}

    def keep(self, index: Tensor) -> None:
        """Move the columns ``index`` [rows, n] to the front; [rows, n, G]: other columns in each head."""
        self.parts = {n: gathered(x, index) for n, x in self.parts.items()}

    def rows(self, at: Tensor) -> Self:
        new = copy.copy(self)
        new.parts = {n: x[at] for n, x in self.parts.items()}
        return new

    def tensors(self) -> Iterator[Tensor]:
        yield from self.parts.values()

    def check(self, capacity: int) -> None:
        assert all(x.shape[1] == capacity for x in self.parts.values()), "a buffer has another size than its store"


MakeBuffer = Callable[[int, str, Slot], Buffer]  # from a layer and a slot's name


class Columns:
    """A store of columns with positions that ascend in each row."""

    def __init__(self, layers: Mapping[int, Mapping[str, Slot]], rows: int, device: torch.device, make: MakeBuffer):
        self.layers, self.device, self.capacity, self.aligned = frozenset(layers), device, 0, True
        self.buffers = {i: {n: make(i, n, s) for n, s in token_slots(slots).items()} for i, slots in layers.items()}
        self.count = [0] * rows  # columns in use, those of tentative tokens included
        self.positions = torch.full((rows, 0), -1, device=device)
        self.kpos, self.seen = self.positions, 0
        self._place: Place = (slice(0), slice(0))
        self._valid: Tensor | None = None  # None: every new token is valid

    # ---- layer side

    def open(self, step: Step, counts: Sequence[int]) -> None:
        start, self.count = self.count, [n + c for n, c in zip(self.count, counts, strict=True)]
        self.seen = max(self.count, default=0)
        self.reserve(self.seen)
        plain = step.start is not None and len(set(start)) == 1
        self.aligned = (self.aligned or not any(start)) and plain and step.start == start[0]
        if plain:
            self._place, self._valid = (slice(None), slice(start[0], self.seen)), None
            self.positions[self._place] = step.pos
        else:
            self._place, self._valid = packed(step.valid, start), step.valid
            self.positions[self._place] = step.pos[step.valid]
        self.kpos = self.positions[:, : self.seen]

    def write(self, layer: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        streams = {}
        for name, buffer in self.buffers[layer].items():
            buffer.write(self._place, new[name] if self._valid is None else new[name][self._valid])
            streams[name] = buffer.read(self.seen)
        return streams

    # ---- engine side

    def drop(self, counts: Sequence[int]) -> None:
        before, self.count = self.count, [n - c for n, c in zip(self.count, counts, strict=True)]
        for row, (new, old) in enumerate(zip(self.count, before, strict=True)):
            if new < old:
                self.positions[row, new:old] = -1
        self.kpos, self._place, self._valid = self.positions[:, :0], (slice(0), slice(0)), None
        self.aligned = self.aligned and len(set(self.count)) <= 1

    def reserve(self, columns: int) -> bool:
        if columns > self.capacity:
            self._resize(max(columns, self.capacity + max(GROWTH, self.capacity // 2)))
        return True

    def keep(self, index: Tensor, count: Sequence[int], room: int) -> None:
        """Move the columns ``index`` to the front, ``count`` of them in each row, and leave ``room`` behind them.

        index [rows, n] ascending, -1 after a row's last; [rows, n, G]: other columns in each head, whose positions are then those
        of the head that kept the latest.
        """
        at = index.clamp(min=0)
        positions = gathered(self.positions if at.dim() == 2 else self.positions[..., None].expand(-1, -1, at.shape[2]), at)
        positions = positions.masked_fill(index < 0, -1)
        self.positions = positions if at.dim() == 2 else positions.amax(-1)
        for buffer in self._each():
            buffer.keep(at)
        self.count, self.aligned = list(count), False
        self._resize(at.shape[1] + room)
        self.kpos = self.positions[:, :0]

    def rows(self, at: Sequence[int]) -> Self:
        new = copy.copy(self)
        index = torch.tensor(at, device=self.device, dtype=torch.long)
        new.count = [self.count[r] for r in at]
        new.positions = self.positions[index]
        new.kpos = new.positions[:, :0]
        new.buffers = {i: {n: b.rows(index) for n, b in layer.items()} for i, layer in self.buffers.items()}
        new.aligned = self.aligned or not any(new.count)
        return new

    def tensors(self) -> Iterator[Tensor]:
        yield self.positions
        for buffer in self._each():
            yield from buffer.tensors()

    def check(self) -> None:
        there = (self.positions >= 0).sum(1).tolist()
        assert there == self.count, f"rows hold {there} positions but {self.count} tokens"
        assert max(self.count, default=0) <= self.capacity
        for buffer in self._each():
            buffer.check(self.capacity)

    # ---- inside

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.positions = resized(self.positions, capacity, fill=-1)
        for buffer in self._each():
            buffer.resize(capacity)

    def _each(self) -> Iterator[Buffer]:
        return (buffer for layer in self.buffers.values() for buffer in layer.values())


def packed(valid: Tensor, start: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(row, column) of each valid token, [n] each: packed behind ``start`` columns of its row."""
    column = torch.tensor(start, device=valid.device)[:, None] + valid.long().cumsum(1) - 1
    row = torch.arange(valid.shape[0], device=valid.device)[:, None].expand_as(column)
    return row[valid], column[valid]


def resized(x: Tensor, columns: int, fill: float = 0) -> Tensor:
    """x [rows, old, ...] cut or padded to ``columns``."""
    if columns <= x.shape[1]:
        return x[:, :columns].clone()
    return torch.cat([x, x.new_full((x.shape[0], columns - x.shape[1], *x.shape[2:]), fill)], 1)


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """x [rows, columns, ...] at columns index [rows, n], or x [rows, columns, G, ...] at index [rows, n, G]."""
    index = index.reshape(*index.shape, *[1] * (x.dim() - index.dim()))
    return x.gather(1, index.expand(x.shape[0], index.shape[1], *x.shape[2:]))


class ColumnCache(TokenCache[Columns]):
    """A cache that lies in columns. make: how a slot is stored, by default exactly. groups: the layers that hold the same tokens,
    by default all of them.
    """

    def __init__(self, layers: Sequence[Mapping[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device,
                 make: MakeBuffer | None = None, groups: Sequence[Sequence[int]] | None = None):  # fmt: skip
        members = [[i for i in group if token_slots(layers[i])] for group in ([range(len(layers))] if groups is None else groups)]
        make = make or (lambda layer, name, slot: Buffer(slot, dtype, rows, device))
        stores = [Columns({i: layers[i] for i in group}, rows, device, make) for group in members if group]
        super().__init__(layers, stores, rows, device)
