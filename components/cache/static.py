"""Buffers of a fixed size, for graphs that are captured once and replayed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from zoo.components.cache._ledger import TokenCache, token_slots
from zoo.components.contracts import CachePolicy, Slot, Step
from zoo.components.registry import part


@part(CachePolicy, "static", source="gpt-fast (PyTorch, 2023) and Hugging Face's StaticCache", example={"tokens": 32})
@dataclass(frozen=True, kw_only=True)
class Static(CachePolicy):
    """Room for ``tokens`` positions a row, taken at once; the token of position p lies in column p. Shapes never change.

    Positions run from 0. A call that goes beyond ``tokens`` is an error, not a longer cache.
    """

    tokens: int = 2048
    graph_safe = True

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.tokens < 1:
            yield "tokens", f"must be at least 1, got {self.tokens}"

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> StaticCache:
        return StaticCache(layers, self.tokens, rows, dtype, device)


class StaticColumns:
    """A store whose writes are scatters to computed columns; padding goes to a last column that nobody looks at."""

    def __init__(self, layers: Mapping[int, Mapping[str, Slot]], tokens: int, rows: int, dtype: torch.dtype, device: torch.device):
        self.layers, self.tokens, self.aligned = frozenset(layers), tokens, False
        self.count = [0] * rows
        self.positions = torch.full((rows, tokens + 1), -1, device=device)
        self.kpos = self.positions[:, :tokens]
        self.row = torch.arange(rows, device=device)[:, None]
        self.buffers = {i: {n: self._zeros(s, dtype) for n, s in token_slots(slots).items()} for i, slots in layers.items()}
        self._column = self.row[:, :0]

    def open(self, step: Step, counts: Sequence[int]) -> None:
        """Counts are not needed: a position says where its token goes."""
        if step.start is not None and step.start + step.pos.shape[1] > self.tokens:
            raise ValueError(f"position {step.start + step.pos.shape[1] - 1} is beyond the static cache's {self.tokens} tokens")
        fits = (step.pos < self.tokens).all()
        torch.ops.aten._assert_async.msg(fits, f"a position is beyond the static cache's {self.tokens} tokens")  # asks the device nothing
        self._column = torch.where(step.valid, step.pos, self.tokens)
        self.positions[self.row, self._column] = step.pos
        self.positions[:, self.tokens] = -1

    def write(self, layer: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, buffer in self.buffers[layer].items():
            buffer[self.row, self._column] = new[name].to(buffer.dtype)
        return {n: b[:, : self.tokens] for n, b in self.buffers[layer].items()}

    def drop(self, counts: Sequence[int]) -> None:
        self._column = self.row[:, :0]
        if not any(counts):
            return
        self.count = [n - c for n, c in zip(self.count, counts, strict=True)]
        number = (self.positions >= 0).cumsum(1)  # not counted from the end: a call that was only captured has written nothing
        self.positions.masked_fill_(number > torch.tensor(self.count, device=number.device)[:, None], -1)

    def reserve(self, columns: int) -> bool:
        return columns <= self.tokens

    def rows(self, at: Sequence[int]) -> Self:
        new, index = copy.copy(self), torch.tensor(at, device=self.row.device, dtype=torch.long)
        new.count, new.positions = [self.count[r] for r in at], self.positions[index]
        new.kpos, new.row = new.positions[:, : self.tokens], torch.arange(len(at), device=index.device)[:, None]
        new.buffers = {i: {n: b[index] for n, b in layer.items()} for i, layer in self.buffers.items()}
        return new

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.positions, self.row)
        yield from (b for layer in self.buffers.values() for b in layer.values())

    def check(self) -> None:
        column = torch.arange(self.tokens, device=self.positions.device)
        assert ((self.kpos == -1) | (self.kpos == column)).all(), "a token lies in another column than its position"
        assert (self.positions[:, self.tokens] == -1).all(), "the column of padding shows a position"
        there = (self.kpos >= 0).sum(1).tolist()
        assert there == self.count, f"rows hold {there} positions but {self.count} tokens"

    def _zeros(self, slot: Slot, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(self.count), self.tokens + 1, *slot.shape, dtype=slot.dtype or dtype, device=self.row.device)


class StaticCache(TokenCache[StaticColumns]):
    """``extend`` asks the device nothing; tokens are counted at ``commit``, outside of a captured graph.

    To replay a captured call: change the contents of its step's ``pos``, replay, then ``replayed(step)`` and ``commit()``.
    """

    def __init__(self, layers: Sequence[Mapping[str, Slot]], tokens: int, rows: int, dtype: torch.dtype, device: torch.device):
        kept = {i: slots for i, slots in enumerate(layers) if token_slots(slots)}
        super().__init__(layers, [StaticColumns(kept, tokens, rows, dtype, device)] if kept else [], rows, device)
        self._next_states = [{n: x.clone() for n, x in layer.items()} for layer in self.states]

    def replayed(self, step: Step) -> None:
        """Tell the cache that a captured call was run again with the positions that ``step`` now holds."""
        self._step = step
        self._new_states = [dict(layer) for layer in self._next_states]

    def _open(self, step: Step) -> None:
        self._check_call(step, self._step is not None)
        for store in self.stores:
            store.open(step, ())
        self._step = step

    def _put(self, layer: int, name: str, new: Tensor) -> None:
        self._new_states[layer][name] = self._next_states[layer][name].copy_(new.detach())

    def _adopt(self, states: dict[str, Tensor], name: str, new: Tensor) -> None:
        states[name].copy_(new)  # a captured graph reads from this address

    def commit(self, keep: Sequence[int] | None = None) -> None:
        if self._step is not None:
            self.pending = (self._step.pos >= 0).sum(1).tolist()
            for store in self.stores:
                store.count = [n + c for n, c in zip(store.count, self.pending, strict=True)]
        super().commit(keep)

    def trim(self, length: Sequence[int]) -> None:
        if self._step is not None:
            self.commit([0] * len(self.length))
        super().trim(length)

    def fork(self, rows: Sequence[int]) -> Self:
        if self._step is not None:
            raise RuntimeError("the cache holds tokens that were not committed; call commit() before fork()")
        new = super().fork(rows)
        new._next_states = [{n: x.clone() for n, x in layer.items()} for layer in new.states]
        return new

    def bytes(self) -> int:
        return super().bytes() + sum(x.numel() * x.element_size() for layer in self._next_states for x in layer.values())
