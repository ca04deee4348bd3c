"""Tokens kept in host memory; each layer's are fetched while the layer before it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.cache._columns import Buffer, Columns, MakeBuffer, Place
from zoo.components.cache._ledger import TokenCache, token_slots
from zoo.components.contracts import CachePolicy, Slot, Step
from zoo.components.registry import part


@part(CachePolicy, "offload", source="FlexGen: Sheng et al. 2023, arXiv:2303.06865, section 4; Hugging Face's OffloadedCache")
@dataclass(frozen=True, kw_only=True)
class Offload(CachePolicy):
    """Every token is kept exactly, in host memory; on the device are the tokens of the layer that runs and of the next one.

    A layer's tokens are sent ahead on a stream of their own. On a CPU the host is the device, and only the copies remain.
    """

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> OffloadCache:
        return OffloadCache(layers, rows, dtype, device)


class HostBuffer(Buffer):
    """A buffer in host memory, pinned where a GPU reads it, so that copies overlap with work."""

    def __init__(self, slot: Slot, dtype: torch.dtype, rows: int, device: torch.device):
        super().__init__(slot, dtype, rows, torch.device("cpu"))
        self.device = device

    def resize(self, columns: int) -> None:
        super().resize(columns)
        self._pin()

    def rows(self, at: Tensor) -> HostBuffer:
        new = super().rows(at.cpu())
        new._pin()
        return new

    def send(self, columns: int) -> Tensor:
        """A copy of the first ``columns`` on the device; row by row, for only whole rows of pinned memory are copied at full speed."""
        source = self.parts["value"]
        target = source.new_empty(source.shape[0], columns, *source.shape[2:], device=self.device)
        for row in range(source.shape[0]):
            target[row].copy_(source[row, :columns], non_blocking=True)
        return target

    def _pin(self) -> None:
        if self.device.type == "cuda":
            self.parts = {n: x.pin_memory() for n, x in self.parts.items()}


class OffloadedColumns(Columns):
    """Columns whose buffers are on the host. New tokens stay on the device until the call is committed."""

    def __init__(self, layers: Mapping[int, Mapping[str, Slot]], rows: int, device: torch.device, make: MakeBuffer):
        super().__init__(layers, rows, device, make)
        self.order = sorted(layers)
        self.following = dict(zip(self.order, self.order[1:], strict=False))
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sent: dict[int, dict[str, Tensor]] = {}
        self._fresh: list[tuple[Buffer, Tensor]] = []

    def open(self, step: Step, counts: Sequence[int]) -> None:
        super().open(step, counts)
        self._send(self.order[0])

    def write(self, layer: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        streams = self._receive(layer)
        if layer in self.following:
            self._send(self.following[layer])
        for name, buffer in self.buffers[layer].items():
            fresh = new[name] if self._valid is None else new[name][self._valid]
            streams[name][self._place] = fresh.to(buffer.dtype)
            self._fresh.append((buffer, fresh))
        return streams

    def drop(self, counts: Sequence[int]) -> None:
        place: Place = tuple(x.cpu() if isinstance(x, Tensor) else x for x in self._place)  # pyright: ignore[reportAssignmentType]
        for buffer, fresh in self._fresh:
            buffer.write(place, fresh.cpu())
        self._fresh, self._sent = [], {}
        super().drop(counts)

    def rows(self, at: Sequence[int]) -> OffloadedColumns:
        new = super().rows(at)
        new._sent, new._fresh = {}, []
        return new

    def _send(self, layer: int) -> None:
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            self._sent[layer] = {n: b.send(self.seen) for n, b in self.buffers[layer].items() if isinstance(b, HostBuffer)}

    def _receive(self, layer: int) -> dict[str, Tensor]:
        streams = self._sent.pop(layer)
        if self.stream:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self.stream)
            for x in streams.values():
                x.record_stream(here)
        return streams


class OffloadCache(TokenCache[OffloadedColumns]):
    def __init__(self, layers: Sequence[Mapping[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device):
        kept = {i: slots for i, slots in enumerate(layers) if token_slots(slots)}
        store = OffloadedColumns(kept, rows, device, lambda layer, name, slot: HostBuffer(slot, dtype, rows, device)) if kept else None
        super().__init__(layers, [store] if store else [], rows, device)
