"""Paged tokens, prefixes found by chained hashes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zoo.components.cache._pages import PagedCache
from zoo.components.cache._prefix import HashIndex
from zoo.components.contracts import CachePolicy, Slot
from zoo.components.registry import part


@part(
    CachePolicy,
    "paged",
    source="PagedAttention: Kwon et al. 2023, arXiv:2309.06180, section 4; prefixes by hash as in vLLM",
    example={"size": 3},
)
@dataclass(frozen=True, kw_only=True)
class Paged(CachePolicy):
    """Tokens lie in blocks of a pool; forks and rows with a common published prefix share blocks, copied when one of them writes.

    size: tokens in a block. blocks: of the pool, for all rows and forks; None lets it grow.
    """

    size: int = 16
    blocks: int | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.size < 1:
            yield "size", f"a block holds at least one token, got {self.size}"
        if self.blocks is not None and self.blocks < 1:
            yield "blocks", f"must be at least 1, got {self.blocks}"

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> PagedCache:
        return PagedCache(layers, rows, dtype, device, size=self.size, blocks=self.blocks, index=HashIndex(self.size))
