"""KIVI: old keys in few bits by channel, old values by token, the newest tokens exact."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from zoo.components.cache._grouped import GroupedCache
from zoo.components.cache._ledger import token_slots
from zoo.components.contracts import CachePolicy, Slot
from zoo.components.numerics.kv import Spread, stored_bytes
from zoo.components.registry import part


@part(CachePolicy, "kivi", source="Liu et al. 2024, arXiv:2402.02750, algorithm 1", example={"group": 4, "residual": 4})
@dataclass(frozen=True, kw_only=True)
class Kivi(CachePolicy):
    """Keys are coded by channel in groups of ``group`` consecutive tokens, values by token in groups of channels; new ones are exact.

    Codes are appended and never made anew. Both slots are coded when a row's length reaches a multiple of ``residual``: keys up to
    there, values up to ``residual`` tokens before (the paper codes one value a token; the same tokens are exact or more).
    A prompt of one call sees itself exactly. by_channel: slots coded by channel.
    """

    bits: Literal[2, 4, 8] = 2
    group: int = 32
    residual: int = 128
    by_channel: tuple[str, ...] = ("k",)
    exact = False

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.group < 2:
            yield "group", f"a group shares its scale among at least 2, got {self.group}"
        elif self.residual < 1 or self.residual % self.group:
            yield "residual", f"must be a multiple of group ({self.group}), got {self.residual}"

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> GroupedCache:
        options = {"bits": self.bits, "group": self.group, "residual": self.residual}
        return GroupedCache(layers, rows, dtype, device, by_channel=self.by_channel, **options)

    def bytes_per_token(self, slots: Mapping[str, Slot], element_bytes: int) -> int:
        """Of a coded token; a group's bytes are shared evenly, rounded up."""
        return math.ceil(sum(self._slot_bytes(n, s, element_bytes) for n, s in token_slots(slots).items()))

    def _slot_bytes(self, name: str, slot: Slot, element_bytes: int) -> float:
        if slot.dtype is not None and not slot.dtype.is_floating_point:
            return math.prod(slot.shape) * slot.dtype.itemsize
        if name in self.by_channel:
            return stored_bytes(Spread(self.bits).layout((*slot.shape, self.group), torch.float32)) / self.group
        return stored_bytes(Spread(self.bits, self.group).layout(slot.shape, torch.float32))
