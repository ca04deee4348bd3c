"""Checkpoints of NVIDIA's Model Optimizer (``quant_method: modelopt``): NVFP4 and FP8."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.packed_float import FloatInputs, PackedFloat
from zoo.components.registry import part
from zoo.components.spec import TensorInfo, dump
from zoo.formats import Format, member, words
from zoo.quantize.formats._float_tensors import Names, Typed, read, write

PLACE = "quantization_config"
MIXED = "MIXED_PRECISION"
GROUP = 16
NAMES: Names = {"packed": "weight", "scale": "weight_scale", "multiplier": "weight_scale_2", "input_multiplier": "input_scale",
                "bias": "bias"}  # fmt: skip
W4 = PackedFloat(element="e2m1", group_size=GROUP, scale="e4m3", tensor_scale="multiplier")
ALGORITHMS = {
    "NVFP4": replace(W4, inputs=FloatInputs(element="e2m1", group_size=GROUP, scale="e4m3", tensor_scale="multiplier")),
    "W4A16_NVFP4": W4,
    "FP8": PackedFloat(element="e4m3", group_outputs=None, inputs=FloatInputs(scale=None, tensor_scale="multiplier")),
}
TYPED: dict[str, Typed] = {"e2m1": {"scale": torch.float8_e4m3fn}, "e4m3": {"packed": torch.float8_e4m3fn}}
SCALARS = ("multiplier", "input_multiplier")


@part(Format, "modelopt", source="NVIDIA Model Optimizer 0.47, unified Hugging Face export")
@dataclass(frozen=True, kw_only=True)
class ModelOpt(Format):
    """NVFP4 with or without rounded inputs, and FP8 by tensors; scales of the tensor and of inputs are multiplied.

    The config is that of ``config.json``; ``hf_quant_config.json`` says the same and is not read.
    """

    method = "modelopt"

    def storage(self, config: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> PackedFloat | None:
        nested = member(config, "quantization", Mapping, {}, PLACE)
        for section, place in ((config, PLACE), (nested, f"{PLACE}.quantization")):
            for field in (f for f in ("kv_cache_quant_algo", "kv_cache_scheme") if section.get(f) is not None):
                raise ValueError(f"{place}.{field} is not supported; the cache is chosen by kv_cache when text is generated")
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in _excluded(config, nested)):
            return None
        algorithm = config.get("quant_algo") or nested.get("quant_algo")
        if algorithm == MIXED:
            layers = member(config, "quantized_layers", Mapping, {}, PLACE) or member(nested, "quantized_layers", Mapping, {}, PLACE)
            if module not in layers:
                return None
            algorithm = member(layers, module, Mapping, {}, f"{PLACE}.quantized_layers").get("quant_algo")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            known = ", ".join([*ALGORITHMS, MIXED])
            raise ValueError(f"{PLACE}.quant_algo: {algorithm!r:.60} is not supported; supported: {known}")
        return ALGORITHMS[algorithm]

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        return [NAMES[name] for name in storage.own_tensors(GROUP, 1, bias)]

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        assert isinstance(storage, PackedFloat)
        return read(storage, NAMES, TYPED[storage.element], tensors, inputs, outputs)

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        assert isinstance(storage, PackedFloat)
        scalars = SCALARS if storage.group_size else (*SCALARS, "scale")
        return write(NAMES, TYPED[storage.element], {name: t.view(()) if name in scalars else t for name, t in tensors.items()})

    def accepts(self, storage: Linear) -> list[str]:
        if _algorithm(storage):
            return []
        hint = "nvfp4 with tensor_scale='multiplier', or fp8 with scale_per='tensor' and inputs='tensor'"
        return [f"modelopt does not hold {dump(storage)}; quantize with {hint}"]

    def config(self, storages: Mapping[str, Linear]) -> dict[str, Any]:
        algorithms = {name: word for name, storage in storages.items() if (word := _algorithm(storage))}
        kinds = Counter(algorithms.values())
        ignored = [name for name in storages if name not in algorithms]
        found: dict[str, Any] = {"quant_method": self.method, "quant_algo": next(iter(kinds)) if len(kinds) == 1 else MIXED,
                                 "kv_cache_quant_algo": None, "ignore": ignored, "exclude_modules": ignored}  # fmt: skip
        if len(kinds) > 1:
            return found | {"quantized_layers": {name: _described(algorithm) for name, algorithm in algorithms.items()}}
        return found | {"group_size": ALGORITHMS[found["quant_algo"]].group_size}


def _excluded(config: Mapping[str, Any], nested: Mapping[str, Any]) -> list[str]:
    own = [name for field in ("ignore", "exclude_modules") for name in words(config, field, PLACE)]
    return own + words(nested, "exclude_modules", f"{PLACE}.quantization")


def _algorithm(storage: Linear) -> str | None:
    wanted = replace(storage, matmul=None) if isinstance(storage, PackedFloat) else storage
    return next((name for name, known in ALGORITHMS.items() if known == wanted), None)


def _described(algorithm: str) -> dict[str, Any]:
    size = ALGORITHMS[algorithm].group_size
    return {"quant_algo": algorithm} | ({"group_size": size} if size else {})
