"""compressed-tensors ``pack-quantized``: the layout of our own packed integers, under other names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.packed_int import PackedInt
from zoo.components.registry import part
from zoo.components.spec import TensorInfo, load
from zoo.formats import Format, expression, member, words

NAMES = {"packed": "weight_packed", "scale": "weight_scale", "zero": "weight_zero_point", "bias": "bias"}
PLACE = "quantization_config"
SHAPE = "weight_shape"
INDEX = "weight_g_idx"
PACKED = "pack-quantized"
UNSUPPORTED = ("kv_cache_scheme", "transform_config", "sparsity_config")


@part(Format, "compressed_tensors", source="compressed-tensors 0.20, format pack-quantized")
@dataclass(frozen=True, kw_only=True)
class CompressedTensors(Format):
    """Integers of 2 to 8 bits packed along the input, scales per channel or group; read by transformers and vLLM.

    Codes are stored with an offset of 2^(bits-1), zero points likewise and packed along the output. Act-order is never stored as an
    index: group scales follow the original order of the inputs.
    """

    method = "compressed-tensors"

    def storage(self, config: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> PackedInt | None:
        problems = [f"quantization_config.{field} is not supported" for field in UNSUPPORTED if config.get(field)]
        if problems:
            raise ValueError("; ".join(problems))
        ignored = words(config, "ignore", PLACE)
        groups = member(config, "config_groups", Mapping, {}, PLACE)
        if not groups:
            raise ValueError(f"{PLACE}.config_groups is missing or empty; it says how the weights are quantized")
        targets = {target: name for name, group in groups.items() for target in _targets(name, group)}
        if _match(module, ignored, f"{PLACE}.ignore") is not None:
            return None
        match = _match(module, targets, f"{PLACE}.config_groups")
        if match is None:
            return None
        group = groups[targets[match]]
        place = f"{PLACE}.config_groups.{targets[match]}"
        return _storage(group, place, group.get("format") or config.get("format"), tensors)

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        return [*(NAMES[name] for name in storage.own_tensors(1, 1, bias)), SHAPE]

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        if tensors[SHAPE].tolist() != [outputs, inputs]:
            raise ValueError(f"{SHAPE} says {tensors[SHAPE].tolist()}, the model has {[outputs, inputs]}")
        ours = {name: tensors[theirs] for name, theirs in NAMES.items() if theirs in tensors}
        for name, info in storage.own_tensors(inputs, outputs, "bias" in ours).items():
            if ours[name].shape != info.shape:
                raise ValueError(f"{NAMES[name]} is {list(ours[name].shape)}, a weight of {[outputs, inputs]} has {list(info.shape)}")
            if info.dtype and ours[name].dtype != getattr(torch, info.dtype):
                raise ValueError(f"{NAMES[name]} is {str(ours[name].dtype).removeprefix('torch.')}, it must be {info.dtype}")
        return ours

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        return {NAMES[n]: t for n, t in tensors.items()} | {SHAPE: torch.tensor([outputs, inputs])}

    def accepts(self, storage: Linear) -> list[str]:
        if not isinstance(storage, PackedInt):
            return [f"pack-quantized holds packed_int, not {storage.name}"]
        return ["pack-quantized holds groups of neighbouring inputs; write gptq_v2"] if storage.scattered else []

    def config(self, storages: Mapping[str, Linear]) -> dict[str, Any]:
        """One group per kind of storage. The most frequent one targets all linears, the others name their modules."""
        kinds: dict[PackedInt, list[str]] = {}
        for name, storage in storages.items():
            if isinstance(storage, PackedInt):
                kinds.setdefault(_kind(storage), []).append(name)
        ranked = sorted(kinds, key=lambda k: len(kinds[k]))
        groups = {f"group_{i}": _group(k, ["Linear"] if k == ranked[-1] else kinds[k]) for i, k in enumerate(ranked)}
        return {
            "quant_method": self.method,
            "format": PACKED,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [name for name, storage in storages.items() if not isinstance(storage, PackedInt)],
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def _kind(storage: PackedInt) -> PackedInt:
    """What the config says of a storage: how it is multiplied is not stored."""
    return PackedInt(bits=storage.bits, group_size=storage.group_size, symmetric=storage.symmetric)


def _group(kind: PackedInt, targets: list[str]) -> dict[str, Any]:
    return {
        "targets": targets,
        "format": PACKED,
        "weights": {
            "num_bits": kind.bits,
            "type": "int",
            "symmetric": kind.symmetric,
            "strategy": "group" if kind.group_size else "channel",
            "group_size": kind.group_size,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
    }


def _storage(group: Mapping[str, Any], place: str, format: Any, tensors: Mapping[str, TensorInfo]) -> PackedInt:
    weights = dict(member(group, "weights", Mapping, {}, place))
    size = weights.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"  # as the library does
    weights["strategy"] = weights.get("strategy") or inferred
    problems = [*_refusals(group, weights, format), *(f"{name}: act-order by index is not supported" for name in tensors if name == INDEX)]
    if problems:
        raise ValueError("; ".join(f"{place}.{p}" for p in problems))
    settings = {"bits": weights["num_bits"], "group_size": size if weights["strategy"] == "group" else None,
                "symmetric": weights.get("symmetric") is not False}  # fmt: skip
    plain = load(PackedInt, settings, place)
    scale = tensors.get(NAMES["scale"], TensorInfo(())).dtype
    usual = scale in (None, str(plain.grid.scale_dtype).removeprefix("torch."))
    return plain if usual else load(PackedInt, settings | {"scale_dtype": scale}, place)


def _targets(name: str, group: Any) -> list[str]:
    if not isinstance(group, Mapping):
        raise ValueError(f"{PLACE}.config_groups.{name} is a preset; write the scheme out")
    return words(group, "targets", f"{PLACE}.config_groups.{name}")


def _refusals(group: Mapping[str, Any], weights: Mapping[str, Any], format: Any) -> Iterator[str]:
    allowed: dict[str, tuple[Any, ...]] = {
        "type": ("int", None),
        "num_bits": (2, 3, 4, 5, 6, 7, 8),
        "strategy": ("group", "channel"),
        "dynamic": (False, None),
        "symmetric": (True, False, None),
        "actorder": (None, False, "weight", "static"),
    }
    if format != PACKED:
        yield f"format: {format!r} is not supported; supported: {PACKED}"
    for field, values in allowed.items():
        value = weights.get(field)
        if (type(value), value) not in [(type(v), v) for v in values]:  # True is not 1
            said = " is missing" if value is None else f": {value!r:.60} is not supported"
            yield f"weights.{field}{said}; supported: {', '.join(str(v) for v in values if v is not None)}"
    size = weights.get("group_size")
    if weights.get("strategy") == "group" and not (type(size) is int and size > 0):
        yield f"weights.group_size: a positive number is needed, got {size!r:.60}"
    for field in ("input_activations", "output_activations"):
        if group.get(field):
            yield f"{field}: quantized activations are not supported with packed weights"


def _match(module: str, targets: Iterable[str], place: str) -> str | None:
    """The target that holds for a linear module: its whole name, else the first expression (``re:``) in order, else its class."""
    ordered = sorted(targets, key=lambda target: (target.startswith("re:"), target))
    by_name = (t for t in ordered if t == module or (t.startswith("re:") and expression(t[3:], module, place)))
    return next(by_name, "Linear" if "Linear" in ordered else None)
