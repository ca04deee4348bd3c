"""Paged tokens, prefixes found by a radix tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zoo.components.cache._pages import PagedCache
from zoo.components.cache._prefix import RadixIndex
from zoo.components.contracts import CachePolicy, Slot
from zoo.components.registry import part


@part(
    CachePolicy,
    "paged_radix",
    source="RadixAttention: Zheng et al. 2023, arXiv:2312.07104, section 3",
    example={"size": 1},
)
@dataclass(frozen=True, kw_only=True)
class PagedRadix(CachePolicy):
    """``paged`` whose published prefixes are found in a radix tree; with ``size`` 1 they are shared to the token.

    size: tokens in a block. blocks: of the pool, for all rows and forks; None lets it grow.
    """

    size: int = 1
    blocks: int | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.size < 1:
            yield "size", f"a block holds at least one token, got {self.size}"
        if self.blocks is not None and self.blocks < 1:
            yield "blocks", f"must be at least 1, got {self.blocks}"

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> PagedCache:
        return PagedCache(layers, rows, dtype, device, size=self.size, blocks=self.blocks, index=RadixIndex(self.size))
