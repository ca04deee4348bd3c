"""The plain cache: every token of every row, in one buffer per slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zoo.components.cache._columns import ColumnCache
from zoo.components.contracts import CachePolicy, Slot
from zoo.components.registry import part


@part(CachePolicy, "dense", source="kept keys and values: Pope et al. 2022, arXiv:2211.05102, section 3.3")
@dataclass(frozen=True, kw_only=True)
class Dense(CachePolicy):
    """Every token is kept exactly. Rows have lengths of their own; rollback is free."""

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> ColumnCache:
        return ColumnCache(layers, rows, dtype, device)
