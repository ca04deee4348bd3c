"""Tokens in blocks of one pool, found through a table for each row; rows and forks share blocks until one of them writes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from zoo.components.cache._blocks import Allocator, PrefixIndex
from zoo.components.cache._columns import packed
from zoo.components.cache._ledger import TokenCache, token_slots
from zoo.components.contracts import Slot, Step


class CacheFullError(RuntimeError):
    """A fixed pool has fewer free blocks than a call needs; nothing has been written."""


class Pool:
    """The blocks of all layers: [blocks, size, *slot shape] each, and the positions [blocks, size] of their tokens.

    A block has one number in every layer. Block 0 is zero and holds no position; columns that have no token read from it.
    """

    def __init__(self, layers: Mapping[int, Mapping[str, Slot]], size: int, blocks: int | None, index: PrefixIndex,
                 dtype: torch.dtype, device: torch.device):  # fmt: skip
        self.size, self.fixed = size, blocks is not None
        total = 1 + (blocks or 0)
        self.allocator = Allocator(total, index)
        self.users: weakref.WeakSet[Pages] = weakref.WeakSet()
        self.positions = torch.full((total, size), -1, device=device)
        self.blocks = {
            i: {n: torch.zeros(total, size, *s.shape, dtype=s.dtype or dtype, device=device) for n, s in token_slots(slots).items()}
            for i, slots in layers.items()
        }

    def provide(self, blocks: int) -> bool:
        """Have that many blocks available, growing by at least half where the pool may grow."""
        lacking = blocks - self.allocator.available
        if lacking > 0 and not self.fixed:
            self._grow(max(lacking, len(self.positions) // 2))
        return blocks <= self.allocator.available

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in all layers."""
        source, target = torch.tensor(pairs, device=self.positions.device).unbind(1)
        for x in self.tensors():
            x[target] = x[source]

    def tensors(self) -> Iterator[Tensor]:
        yield self.positions
        yield from (x for layer in self.blocks.values() for x in layer.values())

    def check(self) -> None:
        self.allocator.check(table for pages in self.users for table in pages.tables)
        assert all((x[0] == 0).all() for layer in self.blocks.values() for x in layer.values()), "the block of padding was written"
        assert (self.positions[0] == -1).all(), "the block of padding shows a position"
        assert len(self.positions) == len(self.allocator.holders)

    def _grow(self, more: int) -> None:
        self.allocator.grow(more)
        self.positions = torch.cat([self.positions, self.positions.new_full((more, self.size), -1)])
        for layer in self.blocks.values():
            for name, x in layer.items():
                layer[name] = torch.cat([x, x.new_zeros(more, *x.shape[1:])])


class Pages:
    """A store of rows that lie in a pool's blocks."""

    def __init__(self, pool: Pool, tables: list[list[int]], count: list[int]):
        self.pool, self.tables, self.count = pool, tables, count
        self.layers, self.aligned = frozenset(pool.blocks), True
        self.kpos = pool.positions[:, :0]
        self._target = self._source = self.kpos
        self._valid: Tensor | None = None
        pool.users.add(self)
        self.close = weakref.finalize(self, _release, pool.allocator, tables)  # also when the last reference goes

    # ---- layer side

    def open(self, step: Step, counts: Sequence[int]) -> None:
        """Raises CacheFullError where a fixed pool has too few blocks."""
        after = [n + c for n, c in zip(self.count, counts, strict=True)]
        self._claim(after, counts)
        start, self.count = self.count, after
        plain = step.start is not None and len(set(start)) == 1
        self.aligned = (self.aligned or not any(start)) and plain and step.start == start[0]
        self._valid = step.valid
        self._place(step, start)

    def write(self, layer: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        streams = {}
        for name, blocks in self.pool.blocks[layer].items():
            flat = blocks.flatten(0, 1)
            flat[self._target] = new[name][self._valid].to(flat.dtype)
            streams[name] = flat[self._source]
        return streams

    def _place(self, step: Step, start: Sequence[int]) -> None:
        """Where the new tokens go and where all visible ones lie, as indices into the pool's tokens."""
        size, device = self.pool.size, self.pool.positions.device
        seen = max(self.count, default=0)
        longest = max(map(len, self.tables), default=0)
        table = torch.tensor([t + [0] * (longest - len(t)) for t in self.tables], device=device, dtype=torch.long)
        column = torch.arange(seen, device=device)
        there = column < torch.tensor(self.count, device=device)[:, None]
        self._source = torch.where(there, table[:, column // size] * size + column % size, 0)
        row, at = packed(step.valid, start)
        self._target = self._source[row, at]
        positions = self.pool.positions.flatten()
        positions[self._target] = step.pos[step.valid]
        self.kpos = positions[self._source]

    # ---- engine side

    def _claim(self, after: Sequence[int], counts: Sequence[int]) -> None:
        """Blocks for ``after`` tokens a row, all or none; a block that others see is copied before it is written."""
        stale = [row for row, c in enumerate(counts) if c and self._shared_tail(row)]
        need = [max(0, -(-n // self.pool.size) - len(t)) for n, t in zip(after, self.tables, strict=True)]
        if not self.pool.provide(sum(need) + len(stale)):
            free = self.pool.allocator.available
            raise CacheFullError(f"a call needs {sum(need) + len(stale)} blocks of {self.pool.size} tokens and {free} are free")
        self._own_tails(stale)
        for row, c in enumerate(counts):
            if c and self.count[row] % self.pool.size and self.tables[row][-1] in self.pool.allocator.known:
                self.pool.allocator.unpublish(self.tables[row][-1])  # it was cut back, and its tokens are about to change
        for table, blocks in zip(self.tables, need, strict=True):
            table += [self.pool.allocator.take() for _ in range(blocks)]

    def _shared_tail(self, row: int) -> bool:
        return self.count[row] % self.pool.size > 0 and self.pool.allocator.holders[self.tables[row][-1]] > 1

    def _own_tails(self, rows: Sequence[int]) -> None:
        pairs = []
        for row in rows:
            old = self.tables[row][-1]
            if self.pool.allocator.holders[old] > 1:  # the last of several sharers keeps the block
                self.tables[row][-1] = self.pool.allocator.take()
                self.pool.allocator.release([old])
                pairs.append((old, self.tables[row][-1]))
        if pairs:
            self.pool.copy(pairs)

    def drop(self, counts: Sequence[int]) -> None:
        self.count = [n - c for n, c in zip(self.count, counts, strict=True)]
        for table, n in zip(self.tables, self.count, strict=True):
            keep = -(-n // self.pool.size)
            self.pool.allocator.release(table[keep:])
            del table[keep:]
        self.kpos = self._target = self._source = self.pool.positions[:, :0]
        self._valid = None
        self.aligned = self.aligned and len(set(self.count)) <= 1

    def reserve(self, columns: int) -> bool:
        need = sum(max(0, -(-columns // self.pool.size) - len(t)) for t in self.tables)
        return self.pool.provide(need + sum(map(self._shared_tail, range(len(self.tables)))))

    def rows(self, at: Sequence[int]) -> Self:
        """Shares every block; nothing is copied."""
        tables = [list(self.tables[r]) for r in at]
        for table in tables:
            self.pool.allocator.share(table)
        new = type(self)(self.pool, tables, [self.count[r] for r in at])
        new.aligned = self.aligned or not any(new.count)
        return new

    def tensors(self) -> Iterator[Tensor]:
        return self.pool.tensors()

    def check(self) -> None:
        self.pool.check()
        assert [len(t) for t in self.tables] == [-(-n // self.pool.size) for n in self.count], "a table has another length than its row"


class PagedCache(TokenCache[Pages]):
    """Rows in a pool that forks share; ``bytes`` counts the whole pool. ``close`` gives the blocks back at once."""

    def __init__(self, layers: Sequence[Mapping[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device, *,
                 size: int, blocks: int | None, index: PrefixIndex):  # fmt: skip
        kept = {i: slots for i, slots in enumerate(layers) if token_slots(slots)}
        pool = Pool(kept, size, blocks, index, dtype, device)
        super().__init__(layers, [Pages(pool, [[] for _ in range(rows)], [0] * rows)] if kept else [], rows, device)
        self.size = size

    def match(self, row: int, tokens: Sequence[int]) -> int:
        """Begin an empty row with the longest published prefix of ``tokens``; returns its length.

        At least one token is left over, for there must be something to compute. Raises ValueError for a row that is not empty, and
        for layers with states, which no block holds.
        """
        self._check_shareable()
        if self.length[row] or self.pending[row]:
            raise ValueError(f"row {row} already holds {self.length[row] + self.pending[row]} tokens; trim it to 0 first")
        (store,) = self.stores
        found = store.pool.allocator.index.match(tokens[: (len(tokens) - 1) // self.size * self.size])
        store.pool.allocator.share(found)
        store.tables[row][:] = found
        store.count[row] = self.length[row] = len(found) * self.size
        store.aligned = len(set(store.count)) <= 1 and store.aligned
        return self.length[row]

    def publish(self, row: int, tokens: Sequence[int]) -> None:
        """Let later rows find this one's full blocks: ``tokens`` are the ids of all that it holds, at positions from 0."""
        self._check_shareable()
        if len(tokens) != self.length[row]:
            raise ValueError(f"row {row} holds {self.length[row]} tokens, not {len(tokens)}")
        (store,) = self.stores
        full = len(tokens) // self.size
        store.pool.allocator.publish(tokens[: full * self.size], store.tables[row][:full])

    def close(self) -> None:
        """Give all blocks back; the cache is empty afterwards. Done twice, it does nothing."""
        self.trim([0] * len(self.length))

    def _check_shareable(self) -> None:
        if any(self.states) or not self.stores:
            raise ValueError("prefixes are shared by blocks of tokens; layers with states have no such blocks")


def _release(allocator: Allocator, tables: list[list[int]]) -> None:
    for table in tables:
        allocator.release(table)
        table.clear()
