"""The plain cache: every token of every row, in one buffer per slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.contracts import CachePolicy, Slot, Step, View
from zoo.components.registry import part

GROWTH = 256  # columns; buffers grow by at least this and by half their size, so that appending stays linear


@part(CachePolicy, "dense", source="kept keys and values: Pope et al. 2022, arXiv:2211.05102, section 3.3")
@dataclass(frozen=True, kw_only=True)
class Dense(CachePolicy):
    """Every token is kept exactly. Rows have lengths of their own; rollback is free."""

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> DenseCache:
        return DenseCache(layers, rows, dtype, device)


class DenseCache:
    """Buffers [rows, capacity, *slot shape] per layer and slot; valid tokens are packed from column 0 in each row.

    ``extend`` writes behind what is kept, ``commit`` says how many of the new tokens stay. ``length`` is known to the host.
    """

    def __init__(self, layers: Sequence[Mapping[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device):
        self.layers, self.dtype, self.device = layers, dtype, device
        self.length = [0] * rows
        self.pending = [0] * rows
        self.capacity = 0
        self.kpos = torch.full((rows, 0), -1, device=device)
        self.aligned = True  # kpos[b, j] == j in every row
        self.tokens = [{n: self._empty(s) for n, s in slots.items() if s.kind == "token"} for slots in layers]
        self.states = [{n: self._zeros(s) for n, s in slots.items() if s.kind == "state"} for slots in layers]
        self._step: Step | None = None
        self._seen, self._kpos = 0, self.kpos  # what the layers of this step look at
        self._place: tuple[slice, slice] | tuple[Tensor, Tensor] = (slice(0), slice(0))

    # ---- layer side

    def extend(self, layer: int, new: Mapping[str, Tensor], step: Step, slots: Mapping[str, Slot]) -> View:
        """Write the new tokens ([B, T, *shape] each) behind each row and show everything that is there."""
        if step is not self._step:
            self._open(step)
        streams = dict(new)
        for name, buffer in self.tokens[layer].items():
            buffer[self._place] = new[name] if step.start is not None else new[name][step.valid]
            streams[name] = buffer[:, : self._seen]
        kpos = self._kpos if self.tokens[layer] else step.pos
        return View(streams, kpos, dict(self.states[layer]), self.aligned, lambda n, x: self._put(layer, n, x))

    def _open(self, step: Step) -> None:
        """Reserve room for a step and find where its tokens go, once for all layers."""
        if any(self.pending):
            raise RuntimeError("the cache holds tokens of an earlier call that were not committed; call commit() first")
        self._step = step
        width = step.pos.shape[1]
        plain = step.start is not None and len(set(self.length)) == 1
        counts = [width] * len(self.length) if step.start is not None else step.valid.sum(1).tolist()
        self._seen = max((n + c for n, c in zip(self.length, counts, strict=True)), default=0)
        self.reserve(self._seen)
        self.aligned = self.aligned and plain and step.start == self.length[0]
        if plain:
            self._place = (slice(None), slice(self.length[0], self.length[0] + width))
            self.kpos[self._place] = step.pos
        else:
            self._place = self._columns(step)
            self.kpos[self._place] = step.pos[step.valid]
            if step.start is not None:
                step.start = None
        self._kpos = self.kpos[:, : self._seen]
        self.pending = counts

    def _columns(self, step: Step) -> tuple[Tensor, Tensor]:
        """(row, column) of each valid token: packed behind the row's length."""
        valid = step.valid
        column = torch.tensor(self.length, device=self.device)[:, None] + valid.long().cumsum(1) - 1
        row = torch.arange(valid.shape[0], device=self.device)[:, None].expand_as(column)
        return row[valid], column[valid]

    def _put(self, layer: int, name: str, new: Tensor) -> None:
        self.states[layer][name] = new.detach()

    # ---- engine side

    def commit(self, keep: Sequence[int] | None = None) -> None:
        """Keep the first keep[b] tokens of the last call in row b (None: all of them) and forget the rest."""
        kept = self.pending if keep is None else list(keep)
        if any(k > p or k < 0 for k, p in zip(kept, self.pending, strict=True)):
            raise ValueError(f"commit(keep={kept}): the last call added {self.pending} tokens")
        self.trim([n + k for n, k in zip(self.length, kept, strict=True)])

    def trim(self, length: Sequence[int]) -> None:
        """Cut each row back to ``length`` tokens."""
        before = [n + p for n, p in zip(self.length, self.pending, strict=True)]
        if any(n > b or n < 0 for n, b in zip(length, before, strict=True)):
            raise ValueError(f"trim({list(length)}): the rows hold {before} tokens")
        for row, (new, old) in enumerate(zip(length, before, strict=True)):
            if new < old:
                self.kpos[row, new:old] = -1
        self.length, self.pending, self._step = list(length), [0] * len(self.length), None
        self.aligned = self.aligned and len(set(self.length)) <= 1

    def fork(self, rows: Sequence[int]) -> DenseCache:
        """A cache whose row i is a copy of row rows[i]: shared prefixes, beams, or a smaller batch."""
        new = DenseCache(self.layers, len(rows), self.dtype, self.device)
        at = torch.tensor(rows, device=self.device, dtype=torch.long)
        new.length, new.capacity = [self.length[r] for r in rows], self.capacity
        new.pending = [0] * len(rows)
        new.kpos = self.kpos[at]
        new.aligned = self.aligned
        new.tokens = [{n: b[at] for n, b in layer.items()} for layer in self.tokens]
        new.states = [{n: b[at] for n, b in layer.items()} for layer in self.states]
        return new

    def reserve(self, columns: int) -> None:
        """Make room for ``columns`` tokens a row; contents stay."""
        if columns <= self.capacity:
            return
        grow = max(columns, self.capacity + max(GROWTH, self.capacity // 2)) - self.capacity
        self.capacity += grow
        self.kpos = torch.cat([self.kpos, self.kpos.new_full((len(self.length), grow), -1)], 1)
        for layer in self.tokens:
            for name, buffer in layer.items():
                layer[name] = torch.cat([buffer, buffer.new_zeros(buffer.shape[0], grow, *buffer.shape[2:])], 1)

    def bytes(self) -> int:
        """Bytes of all buffers, to the byte."""
        held = [b for layer in (*self.tokens, *self.states) for b in layer.values()]
        return sum(b.numel() * b.element_size() for b in held) + self.kpos.numel() * self.kpos.element_size()

    def check(self) -> None:
        """Raise AssertionError if positions and lengths disagree."""
        there = (self.kpos >= 0).sum(1).tolist()
        expect = [n + p for n, p in zip(self.length, self.pending, strict=True)]
        assert there == expect, f"rows hold {there} positions but {expect} tokens"
        assert max(expect, default=0) <= self.capacity

    def _empty(self, slot: Slot) -> Tensor:
        return torch.empty(len(self.length), 0, *slot.shape, dtype=slot.dtype or self.dtype, device=self.device)

    def _zeros(self, slot: Slot) -> Tensor:
        return torch.zeros(len(self.length), *slot.shape, dtype=slot.dtype or torch.float32, device=self.device)

    def __repr__(self) -> str:
        return f"DenseCache(length={self.length}, capacity={self.capacity}, bytes={self.bytes()})"
