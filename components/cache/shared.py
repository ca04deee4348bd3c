"""Layers that read the tokens of an earlier layer and keep none of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.components.cache._ledger import token_slots
from zoo.components.contracts import Ask, Cache, CachePolicy, Call, NoCache, Pattern, Slot, Step, View
from zoo.components.registry import part
from zoo.components.spec import default


@part(
    CachePolicy,
    "shared",
    source="cross-layer attention: Brandon et al. 2024, arXiv:2405.12981; YOCO: Sun et al. 2024, arXiv:2405.05254",
    example={"reads": [0]},
)
@dataclass(frozen=True, kw_only=True)
class Shared(CachePolicy):
    """Layer i attends to the keys and values that layer ``reads[i]`` wrote; ``inner`` keeps those of the layers that write.

    A layer that reads itself writes. ``cross_layer`` and ``decoder_decoder`` make the lists of the two papers. States are each
    layer's own. It changes what the model computes, so calls without a cache share in the same way.
    """

    reads: tuple[int, ...]
    inner: CachePolicy = default(CachePolicy, "dense")

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from ((f"inner.{where}", why) for where, why in self.inner.problems())
        for layer, source in enumerate(self.reads):
            if not 0 <= source <= layer or self.reads[source] != source:
                yield "reads", f"layer {layer} cannot read layer {source}: it must be itself or an earlier layer that reads itself"

    def refuses(self, ask: Ask) -> list[str]:
        return self.inner.refuses(ask)

    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> Any:
        """The inner policy's cache. Raises ValueError where ``reads`` does not fit the layers."""
        self._check(layers)
        cache = self.inner.build(self.written(layers), rows, dtype, device)
        cache.share(self.readers)
        return cache

    def without(self) -> Cache:
        return PassedOn(self.readers)

    def kept(self, tokens: int, slots: Mapping[str, Slot]) -> int:
        return self.inner.kept(tokens, slots)

    def seen(self, call: Call, pattern: Pattern, slots: Mapping[str, Slot]) -> Call:
        return self.inner.seen(call, pattern, slots)

    def bytes_per_token(self, slots: Mapping[str, Slot], element_bytes: int) -> int:
        """Of a layer that writes; one that reads another finds as much there."""
        return self.inner.bytes_per_token(slots, element_bytes)

    def total_bytes(self, layers: Sequence[Mapping[str, Slot]], tokens: int, element_bytes: int) -> int:
        return self.inner.total_bytes(self.written(layers), tokens, element_bytes)

    def total_bytes_per_token(self, layers: Sequence[Mapping[str, Slot]], element_bytes: int) -> int:
        return self.inner.total_bytes_per_token(self.written(layers), element_bytes)

    @property
    def readers(self) -> dict[int, int]:
        """Layer -> the other layer that it reads."""
        return {layer: source for layer, source in enumerate(self.reads) if source != layer}

    def written(self, layers: Sequence[Mapping[str, Slot]]) -> list[dict[str, Slot]]:
        """Slots without the token slots of layers that read another."""
        return [{n: s for n, s in slots.items() if s.kind == "state" or i not in self.readers} for i, slots in enumerate(layers)]

    def _check(self, layers: Sequence[Mapping[str, Slot]]) -> None:
        if len(layers) != len(self.reads):
            raise ValueError(f"cache.reads names {len(self.reads)} layers, the model has {len(layers)}")
        for layer, source in self.readers.items():
            if token_slots(layers[layer]) != token_slots(layers[source]):
                raise ValueError(f"cache.reads: layer {layer} cannot read layer {source}, which keeps other slots or another window")


class PassedOn(NoCache):
    """Nothing is kept; within a call layers see what earlier ones wrote."""

    def __init__(self, reads: Mapping[int, int]):
        self.reads: Mapping[int, int]
        self.shown: dict[int, dict[str, Tensor]]
        self.reads, self.shown = reads, {source: {} for source in reads.values()}

    def extend(self, layer: int, new: Mapping[str, Tensor], step: Step, slots: Mapping[str, Slot]) -> View:
        if layer in self.reads:
            new = {**new, **self.shown[self.reads[layer]]}
        elif layer in self.shown:
            self.shown[layer] = {n: new[n] for n in token_slots(slots)}
        return super().extend(layer, new, step, slots)


def cross_layer(layers: int, group: int = 2) -> tuple[int, ...]:
    """CLA: the first layer of each group of neighbours writes, the others read it."""
    return tuple(i - i % group for i in range(layers))


def decoder_decoder(layers: int) -> tuple[int, ...]:
    """YOCO: the first half writes, all of the second half reads the first of its layers."""
    return tuple(min(i, layers // 2) for i in range(layers))
