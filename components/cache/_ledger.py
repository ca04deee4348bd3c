"""What all caches do alike: they count tokens, hold new ones as tentative until ``commit``, and keep states.

Layer side: ``extend``. Engine side: ``length``, ``reserve``, ``budget``, ``commit``, ``trim``, ``fork``, ``bytes``, ``check``.
Where tokens lie is the business of stores; a policy that forgets or rewrites tokens does it in ``_settle``, at ``commit`` only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from zoo.components.contracts import Slot, Step, View

UNLIMITED = 2**31 - 1


class Store(Protocol):
    """Where the tokens of a group of layers lie. All layers of a group hold the same tokens."""

    layers: frozenset[int]
    count: list[int]  # tokens that each row holds, tentative ones included
    kpos: Tensor  # [rows, visible] positions of what the layers of this call look at, -1 where there is nothing
    aligned: bool  # kpos[b, j] == j in every row

    def open(self, step: Step, counts: Sequence[int]) -> None:
        """Find room for the ``counts`` valid tokens of each row of a call, or raise before anything has changed."""
        ...

    def write(self, layer: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Store one layer's new tokens and return all that it may look at, [rows, visible, *shape] each."""
        ...

    def drop(self, counts: Sequence[int]) -> None:
        """Forget the last ``counts`` tokens of each row. A call that was open is over, and what only it needed is let go."""
        ...

    def reserve(self, columns: int) -> bool:
        """Make room for ``columns`` tokens a row; False where there is none."""
        ...

    def rows(self, at: Sequence[int]) -> Self:
        """A store whose row i holds what row at[i] holds here."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Every buffer, once."""
        ...

    def check(self) -> None:
        """Raise AssertionError where the books do not balance."""
        ...


S = TypeVar("S", bound=Store)


class TokenCache(Generic[S]):
    """Rows of tokens that grow call by call. stores: where they lie, one for each group of layers.

    ``extend`` adds tokens that are tentative until ``commit`` says how many stay. ``length`` is known to the host. floor: the
    shortest length that each row can be cut back to, apart from 0.
    """

    def __init__(self, layers: Sequence[Mapping[str, Slot]], stores: Sequence[S], rows: int, device: torch.device):
        self.stores, self.device = list(stores), device
        self.group_of = {layer: group for group, store in enumerate(stores) for layer in store.layers}
        self.length = [0] * rows
        self.pending = [0] * rows
        self.floor = [0] * rows
        self.states = [self._zeros(slots) for slots in layers]
        self._new_states: list[dict[str, Tensor]] = [{} for _ in layers]
        self._step: Step | None = None
        self.reads: dict[int, int] = {}
        self._shown: dict[int, dict[str, Tensor]] = {}  # what the layers that others read were shown in this call

    # ---- layer side

    def extend(self, layer: int, new: Mapping[str, Tensor], step: Step, slots: Mapping[str, Slot]) -> View:
        """Write the new tokens ([B, T, *shape] each) behind each row and show everything that is there."""
        if step is not self._step:
            self._open(step)
        put = lambda name, state: self._put(layer, name, state)  # noqa: E731
        group = self.group_of.get(self.reads.get(layer, layer))
        if group is None:
            return View(dict(new), step.pos, dict(self.states[layer]), step.start == 0, put, group=-1)
        store = self.stores[group]
        streams = {**new, **self._streams(layer, store, new)}
        return View(streams, store.kpos, dict(self.states[layer]), store.aligned, put, group)

    def _streams(self, layer: int, store: S, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if layer in self.reads:
            return self._shown[self.reads[layer]]
        streams = store.write(layer, new)
        if layer in self._shown:
            self._shown[layer] = streams
        return streams

    def share(self, reads: Mapping[int, int]) -> None:
        """Let layers see the tokens of earlier ones, by number, instead of tokens of their own."""
        self.reads, self._shown = dict(reads), {source: {} for source in reads.values()}

    def _open(self, step: Step) -> None:
        """Find room for a call's tokens, once for all layers."""
        self._check_call(step, any(self.pending))
        counts = [step.pos.shape[1]] * len(self.length) if step.start is not None else step.valid.sum(1).tolist()
        for store in self.stores:
            store.open(step, counts)
        self.pending, self._step = counts, step

    def _check_call(self, step: Step, tentative: bool) -> None:
        if tentative:
            raise RuntimeError("the cache holds tokens of an earlier call that were not committed; call commit() first")
        if step.pos.shape[0] != len(self.length):
            raise ValueError(f"the cache has {len(self.length)} rows, the call {step.pos.shape[0]}")
        if step.segment is not None:
            raise ValueError("a cache keeps one document a row; unpack the documents, or run packed rows without a cache")

    def _put(self, layer: int, name: str, new: Tensor) -> None:
        self._new_states[layer][name] = new.detach()

    # ---- engine side

    def reserve(self, columns: int) -> bool:
        """Make room for ``columns`` tokens a row, so that no call has to; False where there is not that much."""
        return min((store.reserve(columns) for store in self.stores), default=True)

    def budget(self) -> list[int]:
        """Tokens that each row may take in one call before what a single token would have seen differs from what these see."""
        return [UNLIMITED] * len(self.length)

    def commit(self, keep: Sequence[int] | None = None) -> None:
        """Keep the first keep[b] tokens of the last call in row b (None: all of them) and forget the rest.

        States are kept or restored whole: with state slots, a row keeps all of its new tokens or none. Raises ValueError otherwise.
        """
        kept = self.pending if keep is None else list(keep)
        if len(kept) != len(self.pending) or any(k > p or k < 0 for k, p in zip(kept, self.pending, strict=True)):
            raise ValueError(f"commit(keep={kept}): the last call added {self.pending} tokens")
        self._commit_states(kept)
        for store in self.stores:
            store.drop([p - k for p, k in zip(self.pending, kept, strict=True)])
        self.length = [n + k for n, k in zip(self.length, kept, strict=True)]
        self.pending, self._step, self._shown = [0] * len(kept), None, {source: {} for source in self._shown}
        self._settle(kept)

    def trim(self, length: Sequence[int]) -> None:
        """Cut each row back to ``length`` tokens; tentative ones go first. Raises ValueError where a policy has forgotten too much."""
        if any(self.pending):
            self.commit([0] * len(self.pending))
        self._check_trim(list(length))
        for store in self.stores:
            store.drop([c if n == 0 else old - n for n, old, c in zip(length, self.length, store.count, strict=True)])
        for row, n in enumerate(length):
            if n == 0:
                self._reset(row)
        self.length = list(length)

    def fork(self, rows: Sequence[int]) -> Self:
        """A cache whose row i holds what row rows[i] holds: shared prefixes, beams, or a smaller batch."""
        if any(self.pending):
            raise RuntimeError("the cache holds tokens that were not committed; call commit() before fork()")
        new = copy.copy(self)
        at = torch.tensor(rows, device=self.device, dtype=torch.long)
        new.length, new.floor = [self.length[r] for r in rows], [self.floor[r] for r in rows]
        new.pending, new._step = [0] * len(rows), None
        new.stores = [store.rows(rows) for store in self.stores]
        new.states = [{n: x[at] for n, x in layer.items()} for layer in self.states]
        new._new_states = [{} for _ in self.states]
        return new

    def bytes(self) -> int:
        """Bytes of all buffers, to the byte."""
        held = [x for layer in (*self.states, *self._new_states) for x in layer.values()]
        return sum(x.numel() * x.element_size() for x in (*held, *(x for store in self.stores for x in store.tensors())))

    def check(self) -> None:
        """Raise AssertionError if positions, lengths and buffers disagree."""
        for store in self.stores:
            store.check()

    # ---- what policies fill in

    def _settle(self, kept: Sequence[int]) -> None:
        """After a commit of ``kept`` tokens a row: forget, rewrite or publish."""

    def _reset(self, row: int) -> None:
        """A row was cut back to nothing."""
        self.floor[row] = 0
        for layer in self.states:
            for state in layer.values():
                state[row] = 0

    # ---- inside

    def _commit_states(self, kept: Sequence[int]) -> None:
        if not any(self._new_states):
            return
        partial = [row for row, (k, p) in enumerate(zip(kept, self.pending, strict=True)) if 0 < k < p]
        if partial:
            raise ValueError(
                f"commit(keep={list(kept)}): row {partial[0]} keeps {kept[partial[0]]} of {self.pending[partial[0]]} tokens, but a "
                "state cannot be cut in between; keep all or none, and feed the accepted tokens again"
            )
        adopt = [k == p for k, p in zip(kept, self.pending, strict=True)]
        mask = None if all(adopt) else torch.tensor(adopt, device=self.device)
        for old, new in zip(self.states, self._new_states, strict=True):
            for name, x in new.items():
                self._adopt(old, name, x if mask is None else torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, old[name]))
            new.clear()

    def _adopt(self, states: dict[str, Tensor], name: str, new: Tensor) -> None:
        states[name] = new

    def _check_trim(self, length: list[int]) -> None:
        if len(length) != len(self.length) or any(n > old or n < 0 for n, old in zip(length, self.length, strict=True)):
            raise ValueError(f"trim({length}): the rows hold {self.length} tokens")
        stateful = any(self.states)
        for row, (n, old, floor) in enumerate(zip(length, self.length, self.floor, strict=True)):
            if 0 < n < old and (stateful or n < floor):
                why = "it has states, which cannot be cut" if stateful else f"less than {floor} needs tokens that are gone"
                raise ValueError(f"trim({length}): row {row} cannot go back to {n} tokens: {why}; trim it to 0 and feed it again")

    def _zeros(self, slots: Mapping[str, Slot]) -> dict[str, Tensor]:
        return {
            n: torch.zeros(len(self.length), *s.shape, dtype=s.dtype or torch.float32, device=self.device)
            for n, s in slots.items()
            if s.kind == "state"
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length}, bytes={self.bytes()})"


def token_slots(slots: Mapping[str, Slot]) -> dict[str, Slot]:
    return {n: s for n, s in slots.items() if s.kind == "token"}
