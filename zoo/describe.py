"""What a spec amounts to, computed without building it: parameters, bytes and cache size by component."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zoo.components import registry
from zoo.components.contracts import Linear
from zoo.components.spec import Child, Spec, TensorInfo, dump, indices, transform
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
    """Totals of a spec for one dtype of weights and cache."""

    components: list[Component]
    parameters: int
    bytes: int
    cache_bytes_per_token: int
    context: int

    @property
    def bits_per_parameter(self) -> float:
        return 8 * self.bytes / self.parameters


def summarize(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> Summary:
    """Parameters and bytes by component; equal layers share a line."""
    rows = list(_rows(spec, dtype))
    return Summary(
        components=rows,
        parameters=sum(r.parameters for r in rows),
        bytes=sum(r.bytes for r in rows),
        cache_bytes_per_token=spec.cache_bytes_per_token(dtype.itemsize),
        context=spec.context,
    )


def _rows(spec: ModelSpec, dtype: torch.dtype) -> Iterator[Component]:
    children = spec.children()
    yield _row("embed", children["embed"], dtype)
    alike: dict[LayerSpec, list[int]] = {}
    for i, layer in enumerate(spec.layers):
        alike.setdefault(layer, []).append(i)
    for layer, where in alike.items():
        yield from _layer_rows(f"layers.{indices(where)}", Child(layer, (spec.width, where[0])), len(where), dtype)
    yield _row("norm", children["norm"], dtype)
    yield _row("head", children["head"], dtype)


def _layer_rows(name: str, layer: Child, copies: int, dtype: torch.dtype) -> Iterator[Component]:
    """The mixer's and the layer's own parts; those without weights carry the choice alone."""
    inside = {k: c for k, c in layer.spec.children(*layer.at).items() if k != "mixer"}
    mixer = layer.spec.children(*layer.at)["mixer"]
    for key, child in {f"mixer.{k}": c for k, c in mixer.spec.children(*mixer.at).items()}.items():
        yield _row(f"{name}.{key}", child, dtype, copies)
    for key, child in inside.items():
        yield _row(f"{name}.{key}", child, dtype, copies)


def _row(path: str, child: Child, dtype: torch.dtype, copies: int = 1) -> Component:
    stored = child.spec.tensors(*child.at).values()
    return Component(path, _words(child.spec), copies * _weights(child), copies * sum(_bytes(t, dtype) for t in stored))


def _weights(child: Child) -> int:
    dense = transform(child.spec, lambda s: registry.get("linear", "dense").spec() if isinstance(s, Linear) else s)
    return sum(math.prod(t.shape) for t in dense.tensors(*child.at).values())


def _bytes(info: TensorInfo, dtype: torch.dtype) -> int:
    kind = getattr(torch, info.dtype) if info.dtype else dtype
    return math.prod(info.shape) * kind.itemsize


def _words(spec: Spec) -> str:
    """The part's name with the names of the parts in its fields, e.g. ``rope (scaling: llama3)``; defaults stay silent."""
    data = dump(spec)
    if isinstance(data, str):
        return data
    inner = {
        k: v if isinstance(v, str) else v["name"] for k, v in data.items() if (isinstance(v, dict) and "name" in v) or isinstance(v, str)
    }
    named = ", ".join(f"{k}: {v}" for k, v in inner.items() if k != "name")
    return f"{data['name']} ({named})" if named else data["name"]
