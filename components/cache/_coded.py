"""Caches that store each token's vectors in fewer bits and read back what they wrote."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zoo.components.cache._columns import Buffer, ColumnCache, Place
from zoo.components.cache._ledger import token_slots
from zoo.components.contracts import CachePolicy, Slot
from zoo.components.numerics.kv import Codec, Float8, Int8, stored_bytes


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

    def codec_at(self, layer: int, place: int) -> Codec:
        """place: of the slot among those of its layer that are coded."""
        return self.codec

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> ColumnCache:
        def make(layer: int, name: str, slot: Slot) -> Buffer:
            names = coded(layers[layer])
            if name not in names:
                return Buffer(slot, dtype, rows, device)
            return CodedBuffer(slot, dtype, self.codec_at(layer, names.index(name)), rows, device)

        return ColumnCache(layers, rows, dtype, device, make)

    def bytes_per_token(self, slots: Mapping[str, Slot], element_bytes: int) -> int:
        return sum(self._slot_bytes(slot, element_bytes) for slot in token_slots(slots).values())

    def _slot_bytes(self, slot: Slot, element_bytes: int) -> int:
        dtype = slot.dtype or {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[element_bytes]
        exact = {"value": (slot.shape, dtype)}
        return stored_bytes(self.codec.layout(slot.shape, dtype) if dtype.is_floating_point else exact)


def coded(slots: Mapping[str, Slot]) -> list[str]:
    """Names of the slots that hold one vector of floats for each token."""
    return [name for name, slot in token_slots(slots).items() if slot.dtype is None or slot.dtype.is_floating_point]


@dataclass(frozen=True, kw_only=True)
class Eight(Coded):
    """Eight bits with a scale for each token and head, or with scales that are known before.

    scales: for each layer those of its slots (keys, values; or the latent) in their order, a vector's codes times which are its values;
    ``zoo.quantize.calibrate_cache`` finds them. Larger values than they span saturate.
    """

    scales: tuple[tuple[float, ...], ...] | None = None

    codes: ClassVar[type[Int8 | Float8]]

    def problems(self) -> Iterator[tuple[str, str]]:
        for layer, scales in enumerate(self.scales or ()):
            for scale in scales:
                if not 0 < scale < math.inf:
                    yield f"scales.{layer}", f"a scale is above 0 and finite, got {scale}"

    @property
    def codec(self) -> Codec:
        return self.codes(None if self.scales is None else 1.0)

    def codec_at(self, layer: int, place: int) -> Codec:
        return self.codec if self.scales is None else self.codes(self.scales[layer][place])

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> ColumnCache:
        """Raises ValueError where ``scales`` does not fit the layers."""
        wanted, given = [len(coded(slots)) for slots in layers], [len(scales) for scales in self.scales or ()]
        if self.scales is not None and wanted != given:
            raise ValueError(f"cache.scales has {given} scales for the layers, their slots are {wanted}; see zoo.quantize.calibrate_cache")
        return super().build(layers, rows, dtype, device)
