"""Heavy hitters: the last tokens and those that attention has looked at most so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.cache._columns import resized
from zoo.components.cache._votes import Ballot, VoteCache, VotePolicy, counted, first_valid, highest
from zoo.components.contracts import CachePolicy, Slot
from zoo.components.registry import part


@part(
    CachePolicy,
    "h2o",
    source="Zhang et al. 2023, arXiv:2306.14048, algorithm 1",
    example={"heavy": 3, "recent": 3, "interval": 2},
)
@dataclass(frozen=True, kw_only=True)
class HeavyHitters(VotePolicy):
    """Each key/value head keeps its last ``recent`` tokens and the ``heavy`` older ones with the largest sum of attention weights.

    Tokens are forgotten when a row's length passes a multiple of ``interval`` (the paper: after every token); between two multiples
    a row holds up to ``interval`` more, and drafts within ``budget()`` change nothing.
    """

    heavy: int = 512
    recent: int = 512
    interval: int = 16

    def problems(self) -> Iterator[tuple[str, str]]:
        for name in ("heavy", "recent", "interval"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"

    def kept(self, tokens: int, slots: Mapping[str, Slot]) -> int:
        return min(tokens, self.heavy + self.recent + self.interval - 1)

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> HeavyHitterCache:
        return HeavyHitterCache(self, layers, rows, dtype, device)


class HeavyHitterCache(VoteCache):
    def __init__(self, spec: HeavyHitters, layers: Sequence[Mapping[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device):
        super().__init__(layers, rows, dtype, device)
        self.spec = spec

    def budget(self) -> list[int]:
        return [self.spec.interval - n % self.spec.interval for n in self.length]

    def _due(self, kept: Sequence[int]) -> list[bool]:
        self.floor = list(self.length)  # votes of tokens that were cut back later could not be taken back
        every, most = self.spec.interval, self.spec.heavy + self.spec.recent
        passed = [n // every > (n - k) // every for n, k in zip(self.length, kept, strict=True)]
        held = self.stores[0].count if self.stores else self.length
        return [p and n > most for p, n in zip(passed, held, strict=True)]

    def _count(self, group: int, ballot: Ballot, kept: Sequence[int]) -> None:
        votes = counted(ballot, first_valid(ballot.step.valid, kept)[0], self.heads[group])
        if self.votes[group].shape[1] < votes.shape[1]:
            self.votes[group] = resized(self.votes[group], votes.shape[1])
        self.votes[group][:, : votes.shape[1]] += votes

    def _elect(self, group: int, row: int, columns: int) -> Tensor:
        older = columns - self.spec.recent
        heavy = highest(self.votes[group][row, :older], self.spec.heavy)
        recent = torch.arange(older, columns, device=self.device)[:, None].expand(-1, self.heads[group])
        return torch.cat([heavy, recent])
