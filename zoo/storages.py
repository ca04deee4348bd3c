"""Quantized weights of a checkpoint: which storage each linear module has, and how they are read as plain ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from zoo.checkpoint import Checkpoint, CheckpointError
from zoo.components import registry
from zoo.components.contracts import Linear, StoredLinear
from zoo.components.linear.dense import Dense
from zoo.components.spec import Spec, TensorInfo, check
from zoo.dequantized import METHODS, Dequantized, Packed, dequantized
from zoo.family import Family
from zoo.formats import Format
from zoo.model import ModelSpec
from zoo.weights import entries, linear_names, linears, stacked_names

Quantized = Literal["keep", "dequantize"]


def packs(quantization: Any) -> bool:
    """Whether some format keeps weights packed that a quantization_config tells of."""
    formats = (p.spec() for p in registry.parts("format"))
    return isinstance(quantization, Mapping) and any(isinstance(f, Format) and f.answers(quantization) for f in formats)


def readable(checkpoint: Checkpoint, quantized: Quantized = "keep") -> Checkpoint:
    """The checkpoint with plain weights where that is wanted, or where no storage keeps its quantized ones."""
    keeps = quantized == "keep" and packs(checkpoint.config.get("quantization_config"))
    return checkpoint if keeps else dequantized(checkpoint)


def without_rest(checkpoint: Checkpoint, spec: ModelSpec, family: Family) -> Checkpoint:
    """The checkpoint with plain weights in place of quantized ones that no packed module of the spec reads, as where one tensor is several.

    Raises CheckpointError for a tensor whose scales are missing or do not fit it.
    """
    config = checkpoint.config.get("quantization_config")
    if not isinstance(config, Mapping) or str(config.get("quant_method")) not in METHODS:
        return checkpoint
    table = entries(plain_spec(spec), family.rules(spec))
    names = {path: f"{name}.weight" for path, name in linear_names(table).items()} | stacked_names(table)
    kept = {names.get(path, f"{path}.weight") for path, child in linears(spec) if child.spec.name != "dense"}
    try:
        packed = METHODS[config["quant_method"]](config, checkpoint.tensors())
    except ValueError as e:
        raise CheckpointError(f"{checkpoint.reference}: {e}") from None
    rest = {name: found for name, found in packed.items() if name not in kept}
    return Dequantized(checkpoint, rest) if rest else checkpoint


def packed_modules(spec: ModelSpec, family: Family, format: Format, checkpoint: Checkpoint) -> dict[str, Packed]:
    """How the weights of packed modules are read as plain ones, by the names that those have. Raises CheckpointError for one missing."""
    names, found = linear_names(entries(plain_spec(spec), family.rules(spec))), {}
    for path, child in linears(spec):
        if not isinstance(child.spec, Linear) or child.spec.name == "dense":
            continue
        name = names.get(path, path)
        leaves = tuple(format.disk_names(child.spec, False))
        missing = [f"{name}.{leaf}" for leaf in leaves if f"{name}.{leaf}" not in checkpoint.tensors()]
        if missing:
            raise CheckpointError(f"{checkpoint.reference}: the tensors do not fit the model; {len(missing)} missing: {', '.join(missing)}")
        inputs, outputs, _ = child.at
        read = partial(plain_weight, format, child.spec, leaves, inputs, outputs)
        found[f"{name}.weight"] = Packed(tuple(f"{name}.{leaf}" for leaf in leaves), TensorInfo((outputs, inputs), "float32"), read)
    return found


def plain_weight(format: Format, storage: Linear, leaves: Sequence[str], inputs: int, outputs: int, *tensors: torch.Tensor) -> torch.Tensor:
    """The weight [outputs, inputs] float32 of a module by its tensors on disk."""
    module = storage.build(inputs, outputs, False)
    assert isinstance(module, StoredLinear)
    module.hold(format.decode(storage, dict(zip(leaves, tensors, strict=True)), inputs, outputs))
    return module.dense_weight(torch.float32)


def plain_spec(spec: ModelSpec) -> ModelSpec:
    """The spec with every linear storage plain."""
    for path, child in list(linears(spec)):
        if child.spec.name != "dense":
            spec = set_storage(spec, path, Dense())
    return spec


def format_for(quantization: Any) -> Format:
    """The format part that answers to a quantization_config's ``quant_method``. Raises ValueError listing the supported ones."""
    formats = [f for f in (p.spec() for p in registry.parts("format")) if isinstance(f, Format)]
    known = f"supported quant_method: {', '.join(sorted({*METHODS, *(f.method for f in formats)}))}"
    if not isinstance(quantization, Mapping):
        raise ValueError(f"quantization_config must be an object, it is a {type(quantization).__name__} ({quantization!r:.60}); {known}")
    method = quantization.get("quant_method")
    if method is None:
        raise ValueError(f"quantization_config has no quant_method; {known}; without quantized weights leave the whole field out")
    if not isinstance(method, str) or method not in {f.method for f in formats}:
        raise ValueError(f"quantization_config.quant_method: {method!r:.60} is not supported; {known}")
    found = next((f for f in formats if f.answers(quantization)), None)
    if found is None:
        kinds = ", ".join(f.name for f in formats if f.method == method)
        raise ValueError(f"quantization_config is of no known kind of {method}; known: {kinds}; see its checkpoint_format or format")
    return found


def quantized_spec(spec: ModelSpec, family: Family, format: Format, quantization: dict[str, Any],
                   stored: Mapping[str, TensorInfo]) -> ModelSpec:  # fmt: skip
    """The spec with the storage that the quantization config gives each linear module."""
    table = entries(spec, family.rules(spec))
    names = linear_names(table) | (stacked_names(table) if format.together else {})
    tensors: dict[str, dict[str, TensorInfo]] = {}
    modules = {names.get(path, path) for path, _ in linears(spec)}
    for name, info in stored.items():
        # some formats put more than one word below a module
        module = next((part for part in parents(name, format.joint) if part in modules), "")
        tensors.setdefault(module, {})[name.removeprefix(f"{module}{format.joint}")] = info
    tie = spec.head.tie()
    for path, child in list(linears(spec)):
        if tie and path == f"head.{tie[0].removesuffix('.weight')}":
            continue
        name = names.get(path, path)  # modules that share a tensor on disk are packed under their own names
        storage = format.storage(quantization, name, tensors.get(name, {}))
        if storage is not None:
            wrong = check(storage, *child.at)
            if wrong:
                raise ValueError(f"quantization_config does not fit {name}: {'; '.join(wrong)}")
            spec = set_storage(spec, path, storage)
    return spec


def parents(name: str, joint: str) -> Iterator[str]:
    """What a name of words with ``joint`` between them lies below, the nearest first."""
    while joint in name:
        name = name.rpartition(joint)[0]
        yield name


def set_storage(spec: ModelSpec, path: str, storage: Linear) -> ModelSpec:
    """The spec with one linear part replaced; ``path`` is its module path, which is also its place in the spec."""
    return _set(spec, path.split("."), storage)


def _set(node: Any, path: list[str], value: Spec) -> Any:
    if not path:
        return value
    if isinstance(node, tuple):
        i = int(path[0])
        return (*node[:i], _set(node[i], path[1:], value), *node[i + 1 :])
    return dataclasses.replace(node, **{path[0]: _set(getattr(node, path[0]), path[1:], value)})


def idle_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is a bias of zeros beside packed weights, which older tools write for modules that have no bias."""
    module, _, leaf = name.rpartition(".")
    return leaf == "bias" and f"{module}.qweight" in checkpoint.tensors() and not bool(checkpoint.read(name).any())
