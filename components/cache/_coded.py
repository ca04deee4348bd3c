"""Caches that store each token's vectors in fewer bits and read back what they wrote."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.cache._columns import Buffer, ColumnCache, Place
from zoo.components.cache._ledger import token_slots
from zoo.components.contracts import CachePolicy, Slot
from zoo.components.numerics.kv import Codec, stored_bytes


class CodedBuffer(Buffer):
    """One slot of one layer as its codec stores it."""

    def __init__(self, slot: Slot, dtype: torch.dtype, codec: Codec, rows: int, device: torch.device):
        super().__init__(slot, dtype, rows, device)
        self.codec, layout = codec, codec.layout(slot.shape, self.dtype)
        self.parts = {n: torch.empty(rows, 0, *shape, dtype=kind, device=device) for n, (shape, kind) in layout.items()}

    def write(self, place: Place, new: Tensor) -> None:
        for name, x in self.codec.encode(new).items():
            self.parts[name][place] = x

    def read(self, columns: int) -> Tensor:
        return self.codec.decode({n: x[:, :columns] for n, x in self.parts.items()}, self.width, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Coded(CachePolicy):
    """A token is encoded when it is written, alone, so nothing depends on how a text was cut or on tokens that were rejected.

    Slots that hold integers and states stay exact.
    """

    exact = False

    @property
    @abstractmethod
    def codec(self) -> Codec: ...

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> ColumnCache:
        def make(name: str, slot: Slot) -> Buffer:
            exact = not (slot.dtype or dtype).is_floating_point
            return Buffer(slot, dtype, rows, device) if exact else CodedBuffer(slot, dtype, self.codec, rows, device)

        return ColumnCache(layers, rows, dtype, device, make)

    def bytes_per_token(self, slots: Mapping[str, Slot], element_bytes: int) -> int:
        return sum(self._slot_bytes(slot, element_bytes) for slot in token_slots(slots).values())

    def _slot_bytes(self, slot: Slot, element_bytes: int) -> int:
        dtype = slot.dtype or {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[element_bytes]
        exact = {"value": (slot.shape, dtype)}
        return stored_bytes(self.codec.layout(slot.shape, dtype) if dtype.is_floating_point else exact)
