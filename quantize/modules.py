"""Quantize single linear modules of a model in place."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from zoo.components.contracts import StoredLinear, unfilled
from zoo.components.spec import dump
from zoo.model import Model
from zoo.quantize.contracts import Quantized, Quantizer
from zoo.quantize.flow import siblings
from zoo.quantize.report import Row
from zoo.quantize.stats.hessian import Hessian, relative_output_error
from zoo.storages import set_storage
from zoo.weights import folded


def quantize_module(model: Model, path: str, method: Quantizer, hessian: Hessian | None, least_tokens: int = 1) -> Row:
    """Quantize one linear module of a model in place, without its Hessian where that saw fewer tokens than ``least_tokens``."""
    start = time.perf_counter()
    weight = checked_weight(model, path)
    few = method.calibrated and hessian is not None and hessian.tokens < least_tokens
    result = method.quantize(weight, None if few else hessian)
    if few and hessian is not None:
        result.facts["few_tokens"] = f"{hessian.tokens}, at least {least_tokens} are wanted"
    return put(model, path, method, weight, result, hessian, time.perf_counter() - start)


def check_weights(model: Model, paths: Iterable[str]) -> None:
    """Raise ValueError, before any module is replaced, for damaged weights of a model in memory; those in files are checked as they come.

    paths: of the modules to quantize. What only the calibration data can show, a damaged embedding, shows before the first module.
    """
    for path in paths:
        if not linear(model, path).weight.is_meta:
            checked_weight(model, path)
    others = ((name, tensor) for name, tensor in model.named_parameters() if not name.startswith("embed."))
    damaged = [name for name, tensor in others if not tensor.is_meta and tensor.isnan().any()]
    if damaged:
        raise ValueError(f"{folded(damaged)}: the weights hold NaN; the checkpoint is damaged or was cast to a dtype too small for it")


def checked_weight(model: Model, path: str) -> Tensor:
    """The weight of a linear module, [outputs, inputs] float32. Raises ValueError where it holds NaN or infinity."""
    weight = linear(model, path).dense_weight(torch.float32)
    if not weight.isfinite().all():
        raise ValueError(f"{path}: the weight holds NaN or infinity; the checkpoint is damaged or was cast to a dtype too small for it")
    return weight


def put(model: Model, path: str, method: Quantizer, weight: Tensor, result: Quantized, hessian: Hessian | None, seconds: float) -> Row:
    """Replace a module by its quantized form, and say how far that is from its weight. seconds: that the work on it took."""
    replace_linear(model, path, method, result.tensors)
    rounded = linear(model, path).dense_weight(torch.float32)
    return Row(
        module=path,
        method=method.name,
        settings={f.name: dump(getattr(method, f.name)) for f in fields(method)},
        weights=weight.numel(),
        bits_per_weight=8 * sum(t.nbytes for t in result.tensors.values()) / weight.numel(),
        weight_error=float((weight - rounded).norm() / weight.norm().clamp(min=torch.finfo(weight.dtype).tiny)),
        tokens=hessian.tokens if hessian else None,
        output_error=_finite(relative_output_error(weight, rounded, hessian)) if hessian else None,
        seconds=seconds,
        facts=result.facts,
    )


def fitted(model: Model, methods: Mapping[str, Quantizer]) -> dict[str, Quantizer]:
    """The quantizers, those of modules that engines fuse having looked at all of their weights together."""
    found = dict(methods)
    for group in _groups(model, methods):
        shared = found[group[0]]
        if type(shared).for_siblings is not Quantizer.for_siblings:
            found |= dict.fromkeys(group, shared.for_siblings([checked_weight(model, path) for path in group]))
    return found


def _groups(model: Model, methods: Mapping[str, Quantizer]) -> Iterable[tuple[str, ...]]:
    """Siblings among the modules that are quantized in the same way."""
    layers = dict.fromkeys(int(path.split(".")[1]) for path in methods if path.startswith("layers."))
    for index in layers:
        for names in siblings(model.spec.layers[index]):
            paths = tuple(path for name in names if (path := f"layers.{index}.{name}") in methods)
            if len(paths) > 1 and all(methods[path] == methods[paths[0]] for path in paths):
                yield paths


def linear(model: Model, path: str) -> Any:
    """A module of the family ``linear``: it has inputs, outputs, bias and dense_weight."""
    return model.get_submodule(path)


def replace_linear(model: Model, path: str, method: Quantizer, tensors: dict[str, Tensor]) -> None:
    """Put a storage module with these tensors in the place of a linear module, and its part into the model's spec."""
    old = linear(model, path)
    with unfilled():
        new = method.storage.build(old.inputs, old.outputs, old.bias is not None)
    assert isinstance(new, StoredLinear)
    device = old.dense_weight().device
    new.bias = old.bias
    new.hold({name: tensor.to(device) for name, tensor in tensors.items()})
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)
    model.spec = set_storage(model.spec, path, method.storage)


def stored(module: Any) -> dict[str, Tensor]:
    """A quantized module's tensors as they are saved, without the bias."""
    return {name: tensor for name, tensor in module.canonical().items() if name != "bias"}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
