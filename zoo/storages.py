"""Quantized weights of a checkpoint: which storage each linear module has, and how they are read as plain ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from zoo.checkpoint import Checkpoint, CheckpointError
from zoo.components import registry
from zoo.components.contracts import Linear, StoredLinear
from zoo.components.linear.dense import Dense
from zoo.components.spec import Child, Spec, TensorInfo, check, transform
from zoo.dequantized import METHODS, Dequantized, Packed
from zoo.family import Family
from zoo.formats import Format
from zoo.model import ModelSpec
from zoo.weights import SAME, Entry, Rule, changed, entries, linear_names, linears, stacked_names

Quantized = Literal["keep", "dequantize"]


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


def unpacked(checkpoint: Checkpoint, spec: ModelSpec, rules: Sequence[Rule], table: Sequence[Entry], dtype: torch.dtype,
             idle: Collection[str]) -> Dequantized:  # fmt: skip
    """The checkpoint as it would be without its quantization: plain weights, in the layout and under the names of the family's files.

    spec: as declared, with its storages. table: how the files hold it, which they fit. dtype: what weights are rounded to, once.
    idle: names of tensors in the files that nothing reads.
    """
    packed = {path: child for path, child in linears(spec) if child.spec.name != "dense"}
    plain, held, found = plain_spec(spec), {name: entry for entry in table for name in entry.ours}, {}
    infos = plain.tensors()
    for entry in entries(plain, rules):
        if held.get(entry.ours[0]) != entry:
            sources = tuple(dict.fromkeys(_source(name, packed, held) for name in entry.ours))
            parts = tuple(name for source in sources for name in source.theirs)
            shapes = [t.shape for t in entry.op.backward([torch.empty(infos[n].shape, device="meta") for n in entry.ours])]
            for index, (name, shape) in enumerate(zip(entry.theirs, shapes, strict=True)):
                read = partial(_gathered, entry, index, sources, packed, dtype, checkpoint.reference)
                found[name] = Packed(parts, TensorInfo(tuple(shape), str(dtype).removeprefix("torch.")), read)
    return Dequantized(checkpoint, found, idle)


def _source(name: str, packed: Mapping[str, Child], held: Mapping[str, Entry]) -> Entry:
    """Where the files have one of the plain model's tensors: the entry of its module's packed ones, or of the tensor itself."""
    path, _, leaf = name.rpartition(".")
    if path not in packed:
        return held[name]
    if leaf == "bias":
        return Entry(tuple(n for n in held[name].theirs if n.endswith(".bias")), (name,))  # without decoding the weight beside it
    return held[f"{path}.{_leaves(packed[path])[0]}"]


def _gathered(entry: Entry, index: int, sources: Sequence[Entry], packed: Mapping[str, Child], dtype: torch.dtype, reference: str,
              *tensors: Tensor) -> Tensor:  # fmt: skip
    """One of an entry's tensors as plain files have it, made of the tensors of its sources, one source after the other."""
    values: dict[str, Tensor] = {}
    for source in sources:
        read, tensors = tensors[: len(source.theirs)], tensors[len(source.theirs) :]
        values |= _plain_tensors(source, read, packed, dtype, reference)
    return entry.op.backward([values[name] for name in entry.ours])[index]


def _plain_tensors(source: Entry, read: Sequence[Tensor], packed: Mapping[str, Child], dtype: torch.dtype,
                   reference: str) -> dict[str, Tensor]:  # fmt: skip
    """The weights, by our names, of the packed modules that an entry holds, or its one tensor that is plain."""
    tensors = changed(source, list(read), f"{reference}: {', '.join(source.theirs)}")
    values = dict(zip(source.ours, tensors, strict=True))
    if source.op is SAME:
        return {name: tensor.to(dtype) for name, tensor in values.items()}
    modules = dict.fromkeys(path for name in source.ours for path in parents(name, ".") if path in packed)
    return {f"{path}.weight": _weight(packed[path], {n: values[f"{path}.{n}"] for n in _leaves(packed[path])}, dtype) for path in modules}


def _leaves(child: Child) -> list[str]:
    """Names of a packed module's tensors, the bias aside."""
    inputs, outputs, _ = child.at
    return list(child.spec.tensors(inputs, outputs, False))


def _weight(child: Child, tensors: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The weight [outputs, inputs] of a module by its packed tensors."""
    storage, (inputs, outputs, _) = child.spec, child.at
    assert isinstance(storage, Linear)
    module = storage.build(inputs, outputs, False)
    assert isinstance(module, StoredLinear)
    module.hold(tensors)
    return module.dense_weight(torch.promote_types(dtype, torch.float32)).to(dtype)


def plain_spec(spec: ModelSpec) -> ModelSpec:
    """The spec with every linear storage plain."""
    return transform(spec, lambda part: Dense() if isinstance(part, Linear) else part)


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
