"""Caches that keep the tokens that attention looked at most: votes are counted at commit, for the queries that stay."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from zoo.components.cache._columns import ColumnCache, Columns, gathered
from zoo.components.cache._ledger import token_slots
from zoo.components.contracts import Ask, CachePolicy, Call, Operands, Pattern, PositionModule, Slot, Step, View

QUERIES = 256  # that vote at once: bounds the score matrix of a long prompt
ROOM = 64  # columns behind what is kept after an eviction
GRID = 1024  # votes are compared in steps of 1/GRID, later columns first: rounding noise must not decide


@dataclass(frozen=True, kw_only=True)
class VotePolicy(CachePolicy):
    """Votes are the softmax of the layer's own logits, worked out beside the kernel, so every kernel will do."""

    exact = False
    forgets = True

    def seen(self, call: Call, pattern: Pattern, slots: Mapping[str, Slot]) -> Call:
        """The pattern shows everything that came before, so what is forgotten is missing from what each query sees."""
        kept = replace(call, past=self.kept(int(call.past), slots))
        return replace(kept, shown=pattern.pairs(kept))

    def refuses(self, ask: Ask) -> list[str]:
        reasons = super().refuses(ask)
        if ask.bias:
            reasons.append("needs logits without a position bias: heads keep different tokens")
        if not (ask.pattern.causal and ask.pattern.whole and ask.pattern.window is None):
            reasons.append(f"needs a plain causal pattern, not {ask.pattern.name}: heads keep different tokens")
        return reasons


@dataclass
class Ballot:
    """What a layer's call leaves behind until its queries are known to stay."""

    operands: Operands
    view: View
    step: Step
    pattern: Pattern
    scale: float


class VoteCache(ColumnCache):
    """Each layer keeps its own tokens, and each key/value head its own where slots have one entry a head ([G, ...] each)."""

    def __init__(self, layers: Sequence[Mapping[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device):
        super().__init__(layers, rows, dtype, device, groups=[[i] for i in range(len(layers))])
        self.heads = [_heads(layers[layer]) for store in self.stores for layer in store.layers]
        self._ballots: dict[int, Ballot] = {}
        self.votes = [torch.zeros(rows, 0, heads, dtype=torch.float64, device=device) for heads in self.heads]

    def extend(self, layer: int, new: Mapping[str, Tensor], step: Step, slots: Mapping[str, Slot]) -> View:
        view = super().extend(layer, new, step, slots)

        def observe(operands: Operands, step: Step, pattern: Pattern, position: PositionModule) -> None:
            self._ballots[self.group_of[layer]] = Ballot(operands, view, step, pattern, operands.scale * position.logit_scale)

        if layer in self.group_of:
            view.observe = observe
        return view

    def fork(self, rows: Sequence[int]) -> Self:
        new = super().fork(rows)
        new.votes = [x[torch.tensor(rows, device=self.device, dtype=torch.long)] for x in self.votes]
        new._ballots = {}
        return new

    def bytes(self) -> int:
        return super().bytes() + sum(x.numel() * x.element_size() for x in self.votes)

    @torch.no_grad()
    def _settle(self, kept: Sequence[int]) -> None:
        for group, ballot in self._ballots.items():
            self._count(group, ballot, kept)
        self._ballots.clear()
        due = self._due(kept)
        for group, store in enumerate(self.stores if any(due) else ()):
            self._evict(group, store, due)

    def _evict(self, group: int, store: Columns, due: Sequence[bool]) -> None:
        """Keep the elected columns in the rows that are due and everything in the others."""
        chosen = [self._elect(group, row, n) if d else None for row, (n, d) in enumerate(zip(store.count, due, strict=True))]
        count = [n if c is None else c.shape[0] for n, c in zip(store.count, chosen, strict=True)]
        index = torch.full((len(count), max(count), self.heads[group]), -1, device=self.device)
        for row, (n, c) in enumerate(zip(count, chosen, strict=True)):
            index[row, :n] = torch.arange(n, device=self.device)[:, None] if c is None else c
        self.votes[group] = gathered(self.votes[group], index.clamp(min=0)).masked_fill(index < 0, 0.0)
        store.keep(index[..., 0] if self.heads[group] == 1 else index, count, room=ROOM)

    def _reset(self, row: int) -> None:
        super()._reset(row)
        for votes in self.votes:
            votes[row] = 0

    @abstractmethod
    def _due(self, kept: Sequence[int]) -> list[bool]:
        """Which rows forget tokens now."""

    @abstractmethod
    def _count(self, group: int, ballot: Ballot, kept: Sequence[int]) -> None:
        """Take the votes of the queries that stay."""

    @abstractmethod
    def _elect(self, group: int, row: int, columns: int) -> Tensor:
        """The columns that a row keeps of ``columns``: [n, heads], ascending in each head."""


def counted(ballot: Ballot, voters: Tensor, heads: int) -> Tensor:
    """Attention weights of the queries ``voters`` [B, T] bool, summed: [B, S, heads] float64, query heads in equal groups."""
    a = ballot.operands
    mask = ballot.pattern.mask(ballot.step, ballot.view) & voters[:, None, :, None]
    k = a.k.transpose(1, 2)[:, :, None].float()
    total = k.new_zeros(k.shape[0], k.shape[1], a.q.shape[2] // k.shape[1], k.shape[3], dtype=torch.float64)
    for at in range(0, a.q.shape[1], QUERIES):
        q = a.q[:, at : at + QUERIES].unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4).float()
        keep = mask[:, :, None, at : at + QUERIES]
        scores = (q @ k.mT * ballot.scale).masked_fill(~keep, float("-inf"))
        total = total + scores.softmax(-1).masked_fill(~keep, 0.0).sum(-2, dtype=torch.float64)
    return total.flatten(1, 2).unflatten(1, (heads, -1)).sum(2).transpose(1, 2)


def first_valid(valid: Tensor, kept: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(which of the new tokens stay, [B, T] bool; each valid token's number in its row from 1)."""
    number = valid.long().cumsum(1)
    return valid & (number <= torch.tensor(kept, device=valid.device)[:, None]), number


def highest(votes: Tensor, count: int) -> Tensor:
    """The columns of most votes in each head, ties to the later: votes [n, heads] -> [count, heads], ascending."""
    column = torch.arange(votes.shape[0], device=votes.device)[:, None]
    rank = (votes * GRID).round().long() * votes.shape[0] + column
    return rank.topk(count, dim=0).indices.sort(0).values


def _heads(slots: Mapping[str, Slot]) -> int:
    """Heads that may keep different tokens: the first dim of every token slot, 1 where a slot has no heads (latents)."""
    shapes = [s.shape for s in token_slots(slots).values()]
    return shapes[0][0] if all(len(x) > 1 and x[0] == shapes[0][0] for x in shapes) else 1
