"""Blocks of a pool: who holds which, which are free, and which are kept after use because a prefix index knows their tokens."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Protocol


class PrefixIndex(Protocol):
    """Finds full blocks by the tokens of their row up to the block's end. Each block is known at most once."""

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest known prefix, in order."""
        ...

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Make blocks known (len(tokens) = size * len(blocks)); returns those that are new, where equal tokens were not known."""
        ...

    def forget(self, block: int) -> list[int]:
        """Forget a block and all that can be found only through it; returns them."""
        ...


class Allocator:
    """Counts holders of blocks 1 .. total-1; block 0 stays empty and stands for padding.

    A block without holders is free; it is ``idle`` instead while the index knows it, and taken back when nothing else is free, the
    longest unused first.
    """

    def __init__(self, total: int, index: PrefixIndex):
        self.index = index
        self.holders = [0] * total
        self.free = deque(range(1, total))
        self.idle: dict[int, None] = {}  # in order of release
        self.known: set[int] = set()

    @property
    def available(self) -> int:
        return len(self.free) + len(self.idle)

    def grow(self, blocks: int) -> None:
        self.free.extend(range(len(self.holders), len(self.holders) + blocks))
        self.holders.extend([0] * blocks)

    def take(self) -> int:
        """A block that nobody holds. There must be one ``available``."""
        while not self.free:
            self.unpublish(next(iter(self.idle)))
        block = self.free.popleft()
        self.holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.idle.pop(block, None)
            self.holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back a row's blocks, the last first: prefixes outlive what continues them."""
        for block in reversed(blocks):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                if block in self.known:
                    self.idle[block] = None
                else:
                    self.free.appendleft(block)

    def publish(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        self.known.update(self.index.insert(tokens, blocks))

    def unpublish(self, block: int) -> None:
        """Forget a known block, before its contents change or because room is needed."""
        for gone in self.index.forget(block):
            self.known.discard(gone)
            if gone in self.idle:
                del self.idle[gone]
                self.free.append(gone)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every block is accounted for by these tables."""
        held = Counter(block for table in tables for block in table)
        assert all(held[b] == n for b, n in enumerate(self.holders)), "a block has other holders than the tables say"
        unheld = {b for b, n in enumerate(self.holders) if n == 0 and b}
        assert {*self.free, *self.idle} == unheld, "free blocks and holders disagree"
        assert len(self.free) + len(self.idle) == len(unheld), "a block is free twice"
        assert set(self.idle) <= self.known, "an idle block is unknown"
        assert not self.known & set(self.free), "a free block is known"
        assert held[0] == 0, "the block of padding is held"
