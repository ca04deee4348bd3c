"""SnapKV: the prompt is thinned out once, by what its last tokens look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.cache._votes import Ballot, VoteCache, VotePolicy, counted, first_valid, highest
from zoo.components.contracts import CachePolicy, Slot
from zoo.components.registry import part


@part(
    CachePolicy,
    "snapkv",
    source="Li et al. 2024, arXiv:2404.14469, section 4.1",
    example={"tokens": 4, "window": 2, "pool": 3},
)
@dataclass(frozen=True, kw_only=True)
class SnapKV(VotePolicy):
    """Of a prompt, each key/value head keeps ``tokens``: the last ``window``, and those that these look at most; later ones all stay.

    The prompt is the first call of a row. Votes are averaged over ``pool`` neighbours, so that neighbours stay together, and
    summed over the query heads of a key/value head (the published code keeps a set for each query head).
    """

    tokens: int = 1024
    window: int = 32
    pool: int = 5

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.window < 1 or self.tokens <= self.window:
            yield "tokens", f"must be more than window, which is at least 1; got {self.tokens} and {self.window}"
        if self.pool < 1 or self.pool % 2 == 0:
            yield "pool", f"must be odd, got {self.pool}"

    def kept(self, tokens: int, slots: Mapping[str, Slot]) -> int:
        """Of a prompt."""
        return min(tokens, self.tokens)

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> SnapCache:
        return SnapCache(self, layers, rows, dtype, device)


class SnapCache(VoteCache):
    """``votes`` are needed within a commit only and are empty between calls."""

    def __init__(self, spec: SnapKV, layers: Sequence[Mapping[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device):
        super().__init__(layers, rows, dtype, device)
        self.spec = spec

    def _settle(self, kept: Sequence[int]) -> None:
        due = self._due(kept)
        if not any(due):
            self._ballots.clear()
            return
        super()._settle(kept)
        self.floor = [n if d else f for n, d, f in zip(self.length, due, self.floor, strict=True)]
        self.votes = [x[:, :0].clone() for x in self.votes]

    def _due(self, kept: Sequence[int]) -> list[bool]:
        return [n == k and n > self.spec.tokens for n, k in zip(self.length, kept, strict=True)]

    def _count(self, group: int, ballot: Ballot, kept: Sequence[int]) -> None:
        stay, number = first_valid(ballot.step.valid, kept)
        last = number > torch.tensor(kept, device=self.device)[:, None] - self.spec.window
        self.votes[group] = counted(ballot, stay & last, self.heads[group])

    def _elect(self, group: int, row: int, columns: int) -> Tensor:
        older = columns - self.spec.window
        pooled = F.avg_pool1d(self.votes[group][row, :older].t(), self.spec.pool, 1, self.spec.pool // 2).t()
        chosen = highest(pooled, self.spec.tokens - self.spec.window)
        return torch.cat([chosen, torch.arange(older, columns, device=self.device)[:, None].expand(-1, self.heads[group])])
