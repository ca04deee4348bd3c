"""KIVI's storage: old tokens in few bits, keys by channel over groups of tokens and values by token, the newest exact."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from zoo.components.cache._columns import Buffer, ColumnCache, Place, resized
from zoo.components.contracts import Slot
from zoo.components.numerics.kv import Spread

ROOM = 64  # columns that a tail has beyond what it holds, so that most calls move nothing


class GroupedBuffer(Buffer):
    """The first ``coded[b]`` tokens of row b as codes, the others exact in ``tail`` [rows, room, *shape].

    span: consecutive tokens that share the scales of a channel; 1: each token has its own scales, one a ``group`` of channels.
    """

    def __init__(self, slot: Slot, dtype: torch.dtype, rows: int, device: torch.device, bits: int, group: int, span: int):
        super().__init__(slot, dtype, rows, device)
        self.tail = self.parts.pop("value")
        self.coded, self.span, self.codec = [0] * rows, span, Spread(bits, None if span > 1 else group)
        shape = (*slot.shape, span) if span > 1 else slot.shape
        self.parts = {n: self.tail.new_empty(rows, 0, *s, dtype=kind) for n, (s, kind) in self.codec.layout(shape, self.dtype).items()}

    def write(self, place: Place, new: Tensor) -> None:
        rows, columns = place
        if isinstance(columns, slice) and len(set(self.coded)) == 1:
            columns = slice(columns.start - self.coded[0], columns.stop - self.coded[0])
            self._make_room(columns.stop)
        else:
            rows, columns = _indices(place, new)
            columns = columns - torch.tensor(self.coded, device=new.device)[rows]
            self._make_room(int(columns.max()) + 1 if columns.numel() else 0)
        self.tail[rows, columns] = new

    def _make_room(self, columns: int) -> None:
        if columns > self.tail.shape[1]:
            self.tail = resized(self.tail, columns + ROOM)

    def read(self, columns: int) -> Tensor:
        first, most = min(self.coded, default=0), max(self.coded, default=0)
        parts = self._decoded(most // self.span)
        if first == most:
            return torch.cat([parts, self.tail[:, : columns - most]], 1)
        both = torch.cat([parts, self.tail], 1)
        column, coded = torch.arange(columns, device=both.device)[None], torch.tensor(self.coded, device=both.device)[:, None]
        at = torch.where(column < coded, column, column - coded + most).clamp(max=both.shape[1] - 1)
        return both[torch.arange(both.shape[0], device=both.device)[:, None], at]

    def _decoded(self, units: int) -> Tensor:
        """The first ``units`` codes of each row as tokens, [rows, units * span, *shape]."""
        if units == 0:
            return self.tail[:, :0]
        width = self.width if self.span == 1 else self.span
        x = self.codec.decode({n: p[:, :units] for n, p in self.parts.items()}, width, self.dtype)
        return x if self.span == 1 else x.movedim(-1, 2).flatten(1, 2)

    def encode(self, row: int, upto: int) -> None:
        """Turn the tokens of a row before ``upto`` into codes, for good."""
        start, self.coded[row] = self.coded[row], upto
        fresh, rest = self.tail[row, : upto - start], self.tail[row, upto - start :].clone()
        if self.span > 1:
            fresh = fresh.unflatten(0, (-1, self.span)).movedim(1, -1)
        units = slice(start // self.span, upto // self.span)
        for name, x in self.codec.encode(fresh).items():
            if units.stop > self.parts[name].shape[1]:
                self.parts[name] = resized(self.parts[name], units.stop)
            self.parts[name][row, units] = x
        self.tail[row, : rest.shape[0]] = rest

    def shrink(self, count: Sequence[int]) -> None:
        """Give back what the tail no longer needs for rows of ``count`` tokens."""
        self.tail = resized(self.tail, max(n - c for n, c in zip(count, self.coded, strict=True)) + ROOM)

    def resize(self, columns: int) -> None:
        """Nothing to do: codes and tail grow apart, each when it must."""

    def keep(self, index: Tensor) -> None:
        raise NotImplementedError("codes that tokens share cannot be moved one token at a time")

    def rows(self, at: Tensor) -> Self:
        new = copy.copy(self)
        new.parts, new.tail, new.coded = {n: x[at] for n, x in self.parts.items()}, self.tail[at], [self.coded[r] for r in at.tolist()]
        return new

    def tensors(self) -> Iterator[Tensor]:
        yield self.tail
        yield from self.parts.values()

    def check(self, capacity: int) -> None:
        assert all(c % self.span == 0 and c // self.span <= x.shape[1] for c in self.coded for x in self.parts.values())


def _indices(place: Place, new: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) that broadcast to the first dims of ``new``."""
    rows, columns = place
    if isinstance(rows, Tensor) and isinstance(columns, Tensor):
        return rows, columns
    assert isinstance(columns, slice)
    return torch.arange(new.shape[0], device=new.device)[:, None], torch.arange(columns.start, columns.stop, device=new.device)[None]


class GroupedCache(ColumnCache):
    """Encodes at commit, whole multiples of ``residual`` tokens, so that what a token sees depends on its row's length alone.

    After that the slots ``by_channel`` hold fewer than ``residual`` exact tokens, the others that many more.
    """

    def __init__(self, layers: Sequence[Mapping[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device, *,
                 bits: int, group: int, residual: int, by_channel: Sequence[str]):  # fmt: skip
        def make(layer: int, name: str, slot: Slot) -> Buffer:
            if not (slot.dtype or dtype).is_floating_point:
                return Buffer(slot, dtype, rows, device)
            return GroupedBuffer(slot, dtype, rows, device, bits, group, group if name in by_channel else 1)

        super().__init__(layers, rows, dtype, device, make)
        self.residual = residual

    def budget(self) -> list[int]:
        return [self.residual - n % self.residual for n in self.length]

    def _settle(self, kept: Sequence[int]) -> None:
        due = [(row, n - n % self.residual) for row, n in enumerate(self.length) if n - n % self.residual > self.floor[row]]
        for row, upto in due:
            self.floor[row] = upto
        for buffer in self._buffers() if due else ():
            for row, upto in due:
                buffer.encode(row, upto if buffer.span > 1 else upto - self.residual)
            buffer.shrink(self.length)

    def _reset(self, row: int) -> None:
        super()._reset(row)
        for buffer in self._buffers():
            buffer.coded[row] = 0

    def _buffers(self) -> Iterator[GroupedBuffer]:
        return (b for store in self.stores for layer in store.buffers.values() for b in layer.values() if isinstance(b, GroupedBuffer))
