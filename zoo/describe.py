"""What a spec amounts to, computed without building it: parameters, bytes and cache size by component."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zoo.components import registry
from zoo.components.contracts import Linear
from zoo.components.spec import Child, Spec, dump, indices, transform
from zoo.model import LayerSpec, ModelSpec


@dataclass(frozen=True)
class Component:
    """One line of ``zoo show``. parameters: logical weights, however they are stored. bytes: what is stored."""

    path: str
    part: str
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Summary:
    """Totals of a spec for one dtype of weights and cache. cache_bytes: of the tokens that a row of ``context`` tokens leaves."""

    components: list[Component]
    parameters: int
    bytes: int
    cache_bytes_per_token: int
    cache_bytes: int
    context: int

    @property
    def bits_per_parameter(self) -> float:
        return 8 * self.bytes / self.parameters


def summarize(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> Summary:
    """Parameters and bytes by component; equal layers share a line."""
    rows = [_row(place, dtype) for place in places(spec)]
    return Summary(
        components=rows,
        parameters=sum(r.parameters for r in rows),
        bytes=sum(r.bytes for r in rows),
        cache_bytes_per_token=spec.cache_bytes_per_token(dtype.itemsize),
        cache_bytes=spec.cache.total_bytes(spec.slots(), spec.context, dtype.itemsize),
        context=spec.context,
    )


@dataclass(frozen=True)
class Place:
    """A component of a model: its path, its part, how many equal layers have it, and what such a layer is (None outside layers)."""

    path: str
    child: Child
    copies: int = 1
    layer: LayerSpec | None = None


def places(spec: ModelSpec) -> Iterator[Place]:
    """The components of a model in the order in which a token passes them; equal layers are one."""
    children = spec.children()
    yield Place("embed", children["embed"])
    alike: dict[LayerSpec, list[int]] = {}
    for i, layer in enumerate(spec.layers):
        alike.setdefault(layer, []).append(i)
    for layer, where in alike.items():
        for name, child in _inside(layer, spec.width, where[0]).items():
            yield Place(f"layers.{indices(where)}.{name}", child, len(where), layer)
    yield Place("norm", children["norm"])
    yield Place("head", children["head"])


def _inside(layer: LayerSpec, width: int, index: int) -> dict[str, Child]:
    """The mixer's and the layer's own parts; those without weights carry the choice alone."""
    children = layer.children(width, index)
    mixer = children.pop("mixer")
    return {f"mixer.{k}": c for k, c in mixer.spec.children(*mixer.at).items()} | children


def _row(place: Place, dtype: torch.dtype) -> Component:
    spec, at = place.child.spec, place.child.at
    stored = sum(t.bytes(dtype.itemsize) for t in spec.tensors(*at).values())
    return Component(place.path, words(spec), place.copies * _weights(place.child), place.copies * stored)


def _weights(child: Child) -> int:
    dense = transform(child.spec, lambda s: registry.get("linear", "dense").spec() if isinstance(s, Linear) else s)
    return sum(math.prod(t.shape) for t in dense.tensors(*child.at).values())


def words(spec: Spec) -> str:
    """The part's name with the names of the parts in its fields, e.g. ``rope (scaling: llama3)``; defaults stay silent."""
    data = dump(spec)
    if isinstance(data, str):
        return data
    inner = {
        k: v if isinstance(v, str) else v["name"] for k, v in data.items() if (isinstance(v, dict) and "name" in v) or isinstance(v, str)
    }
    named = ", ".join(f"{k}: {v}" for k, v in inner.items() if k != "name")
    return f"{data['name']} ({named})" if named else data["name"]
