"""Scales of an 8-bit cache in compressed-tensors files: ``kv_cache_scheme`` in the config, two tensors beside each layer's projections."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.checkpoint import Checkpoint, CheckpointError
from zoo.components.contracts import CachePolicy
from zoo.components.spec import load
from zoo.formats import Format, member
from zoo.model import ModelSpec
from zoo.weights import Entry, folded

METHOD = "compressed-tensors"
PLACE = "quantization_config.kv_cache_scheme"
KINDS = {"float": "fp8", "int": "int8"}  # their word for the codes -> our cache
SCHEME = {"num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?([kv])_scale")
SLOTS = ("k", "v")


def with_declared(spec: ModelSpec, quantization: Mapping[str, Any]) -> ModelSpec:
    """The spec with the cache that a quantization_config declares, its scales still 1. Raises ValueError for one that no cache here is."""
    scheme = member(quantization, "kv_cache_scheme", Mapping, {}, "quantization_config")
    if not _declares(quantization):
        return spec
    wrong = [f"{key} {scheme.get(key, value)!r}" for key, value in SCHEME.items() if scheme.get(key, value) != value]
    kind = scheme.get("type", "int")
    if wrong or kind not in KINDS:
        found = ", ".join(wrong or [f"type {kind!r}"])
        raise ValueError(f"{PLACE}: {found} is not supported; what is: 8 bits, float or int, fixed symmetric scales")
    return dataclasses.replace(spec, cache=load(CachePolicy, {"name": KINDS[kind], "scales": _unread(spec)}))


def with_stored(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """The spec with the scales that the files hold. Raises CheckpointError for those that are missing or no scales."""
    declared = checkpoint.config.get("quantization_config")
    if not _declares(declared) or getattr(spec.cache, "scales", None) != _unread(spec):  # another cache, or other scales, were asked for
        return spec
    names = {match.groups(): name for name in checkpoint.tensors() if (match := NAME.fullmatch(name))}
    wanted = [(str(i), slot) for i in range(len(spec.layers)) for slot in _slots(spec, i)]
    missing = [f"layers.{i}.{slot}_scale" for i, slot in wanted if (i, slot) not in names]
    if missing:
        raise CheckpointError(f"{checkpoint.reference}: {PLACE} is set, {len(missing)} scales are missing: {folded(missing)}")
    found = [tuple(_scale(checkpoint, names[str(i), slot]) for slot in _slots(spec, i)) for i in range(len(spec.layers))]
    return dataclasses.replace(spec, cache=dataclasses.replace(spec.cache, scales=tuple(found)))  # pyright: ignore[reportCallIssue]


def is_scale(name: str, quantization: Any) -> bool:
    """Whether a tensor is the scale of a cache that the config declares, and no weight."""
    return _declares(quantization) and NAME.fullmatch(name) is not None


def declares(spec: ModelSpec, format: Format | None) -> bool:
    """Whether a format's files say in their own way which scales the cache has."""
    scales, named = getattr(spec.cache, "scales", None), {*KINDS.values()}
    plain = all(not slots or tuple(slots) == SLOTS for slots in (_slots(spec, i) for i in range(len(spec.layers))))
    return bool(scales) and format is not None and format.method == METHOD and spec.cache.name in named and plain


def scheme(spec: ModelSpec) -> dict[str, Any]:
    """The ``kv_cache_scheme`` of a spec whose cache has scales."""
    return {"type": next(word for word, name in KINDS.items() if name == spec.cache.name), **SCHEME}


def tensors(spec: ModelSpec, table: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, scale [1] float32) of each layer's keys and values, beside its projections."""
    scales: Sequence[Sequence[float]] = getattr(spec.cache, "scales", ())
    for i, pair in enumerate(scales):
        inside = f"layers.{i}.mixer.projection."
        entry = next(e for e in table if any(name.startswith(inside) for name in e.ours))
        place = entry.theirs[0].rsplit(".", 2)[0]
        for slot, scale in zip(SLOTS, pair, strict=False):  # none where the layer keeps no tokens
            yield f"{place}.{slot}_scale", torch.tensor([scale])


def _declares(quantization: Any) -> bool:
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == METHOD and bool(quantization.get("kv_cache_scheme"))


def _unread(spec: ModelSpec) -> tuple[tuple[float, ...], ...]:
    """What stands for scales that are still in the files."""
    return tuple((1.0,) * len(_slots(spec, i)) for i in range(len(spec.layers)))


def _slots(spec: ModelSpec, layer: int) -> list[str]:
    """The layer's slots that have a scale each."""
    slots = spec.layers[layer].mixer.slots()
    return [n for n, s in slots.items() if s.kind == "token" and (s.dtype is None or s.dtype.is_floating_point)]


def _scale(checkpoint: Checkpoint, name: str) -> float:
    tensor = checkpoint.read(name)
    if tensor.numel() != 1 or not tensor.is_floating_point() or not 0 < float(tensor.float()) < float("inf"):
        what = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        raise CheckpointError(f"{checkpoint.reference}: {name} must be one positive number, it is {what}")
    return float(tensor.float())
