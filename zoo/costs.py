"""What a model costs, computed from its spec: operations, bytes read and bytes kept, by component; nothing is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from zoo.components.contracts import CachePolicy, Call, Slot
from zoo.describe import Place, places, words
from zoo.model import LayerSpec, ModelSpec


@dataclass(frozen=True)
class ComponentCost:
    """One line of the costs of a call of one row; equal layers share a line.

    flops: see ``Spec.flops``. bytes_read: weights, once each, and what the cache
    holds of earlier tokens. bytes_kept: what the new tokens add to that; nothing where as many are forgotten.
    """

    path: str
    part: str
    flops: float
    bytes_read: float
    bytes_kept: float = 0.0


@dataclass(frozen=True)
class Costs:
    """The costs of one row's call, for one dtype of weights and cache."""

    call: Call
    components: list[ComponentCost]

    @property
    def flops(self) -> float:
        return sum(c.flops for c in self.components)

    @property
    def bytes_read(self) -> float:
        return sum(c.bytes_read for c in self.components)

    @property
    def bytes_kept(self) -> float:
        return sum(c.bytes_kept for c in self.components)

    @property
    def flops_per_token(self) -> float:
        return self.flops / self.call.new


def decode(spec: ModelSpec, context: int, dtype: torch.dtype = torch.bfloat16) -> Costs:
    """One token whose context, itself included, is ``context`` tokens."""
    return costs(spec, Call(1, context - 1), dtype)


def prefill(spec: ModelSpec, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Costs:
    """A prompt of ``tokens`` tokens, with the logits of each."""
    return costs(spec, Call(tokens), dtype)


def in_words(spec: ModelSpec, context: int, dtype: torch.dtype = torch.bfloat16) -> str:
    """The totals of ``prefill`` and ``decode`` at a context, on two lines."""
    prompt, one = prefill(spec, context, dtype), decode(spec, context, dtype)
    return (
        f"a token of a prompt of {context:,}: {prompt.flops_per_token:,.0f} FLOP in matrix products\n"
        f"a token decoded at a context of {context:,}: {one.flops:,.0f} FLOP, {one.bytes_read:,.0f} bytes read, "
        f"{one.bytes_kept:,.0f} kept"
    )


def costs(spec: ModelSpec, call: Call, dtype: torch.dtype = torch.bfloat16) -> Costs:
    """The costs of a call by component. Raises ValueError for a call without new tokens."""
    if call.new < 1 or call.past < 0:
        raise ValueError(f"a call has at least 1 new token and no fewer than 0 past ones, got {call.new} and {call.past}")
    return Costs(call, list(_components(spec, call, dtype.itemsize)))


def _components(spec: ModelSpec, call: Call, element_bytes: int) -> Iterator[ComponentCost]:
    seen: dict[LayerSpec, Call] = {}
    for place in places(spec):
        if place.layer and place.layer not in seen:
            seen[place.layer] = spec.cache.seen(call, place.layer.mixer.pattern, place.layer.mixer.slots())
        yield _component(place, seen[place.layer] if place.layer else call, element_bytes)
    slots, past = spec.slots(), int(call.past)
    read = sum(_cache_read(spec.cache, layer, past, element_bytes) for layer in slots)
    before, after = (spec.cache.total_bytes(slots, tokens, element_bytes) for tokens in (past, past + int(call.new)))
    yield ComponentCost("cache", words(spec.cache), 0, read, after - before)


def _component(place: Place, call: Call, element_bytes: int) -> ComponentCost:
    spec, at, copies = place.child.spec, place.child.at, place.copies
    return ComponentCost(place.path, words(spec), copies * spec.flops(call, *at), copies * spec.bytes_read(call, element_bytes, *at))


def _cache_read(policy: CachePolicy, slots: Mapping[str, Slot], past: int, element_bytes: int) -> float:
    """One layer's: the earlier tokens that are kept and that some new token may see, a window's or all, and the states, whole."""
    windows = [s.window for s in slots.values() if s.window]
    earlier = min([policy.kept(past, slots), *(w - 1 for w in windows)])
    states = sum(s.bytes(element_bytes) for s in slots.values() if s.kind == "state") if past else 0
    return policy.bytes_per_token(slots, element_bytes) * earlier + states
