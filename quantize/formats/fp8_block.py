"""FP8 checkpoints as DeepSeek publishes them and transformers writes them (``quant_method: fp8``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.packed_float import FloatInputs, PackedFloat
from zoo.components.registry import part
from zoo.components.spec import TensorInfo, dump
from zoo.formats import Format, member
from zoo.quantize.formats._float_tensors import Names, Typed, read, write

PLACE = "quantization_config"
NAMES: Names = {"packed": "weight", "scale": "weight_scale_inv", "input_multiplier": "activation_scale", "bias": "bias"}
WEIGHT = torch.float8_e4m3fn
POWER = torch.float8_e8m0fnu  # of scales that are powers of two
SCALES = {"float32": "float32", "bfloat16": "bfloat16", "float8_e8m0fnu": "e8m0"}  # dtype on disk -> ours
SCHEMES = ("dynamic", "static")
FIXED = FloatInputs(scale=None, tensor_scale="multiplier")
ALONE = ("scale", "input_multiplier")  # scalars on disk where they are for the whole weight


@part(Format, "fp8_block", source="DeepSeek-AI 2024, arXiv:2412.19437, section 3.3; transformers FineGrainedFP8Config")
@dataclass(frozen=True, kw_only=True)
class FP8Block(Format):
    """E4M3 weights with a scale per block or tensor, and E4M3 inputs with a scale per token and block of channels, per token, or fixed.

    ``weight_scale_inv`` is what codes are multiplied with. Which modules are in FP8 is told by the dtype of their weight in the files.
    """

    method = "fp8"

    def storage(self, config: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> PackedFloat | None:
        size, scheme = block_size(config), config.get("activation_scheme", "dynamic")
        if scheme not in SCHEMES:
            raise ValueError(f"{PLACE}.activation_scheme: {scheme!r:.60} is not supported; supported: {', '.join(SCHEMES)}")
        if config.get("fmt") not in (None, "e4m3"):
            raise ValueError(f"{PLACE}.fmt: {config['fmt']!r:.60} is not supported; supported: e4m3")
        if config.get("scale_fmt") not in (None, "ue8m0"):
            raise ValueError(f"{PLACE}.scale_fmt: {config['scale_fmt']!r:.60} is not supported; supported: ue8m0")
        if not (tensors.get("weight", TensorInfo(())).dtype or "").startswith("float8"):
            return None
        kind = tensors.get(NAMES["scale"], TensorInfo((), "float32")).dtype
        if kind not in SCALES:
            raise ValueError(f"{NAMES['scale']} of {module} is {kind}; supported: {', '.join(SCALES)}")
        outputs, inputs = size or (None, None)
        rounded = FIXED if scheme == "static" else _dynamic(inputs, config.get("scale_fmt") == "ue8m0")
        plain = PackedFloat(element="e4m3", group_outputs=outputs, group_size=inputs, inputs=rounded)
        return replace(plain, scale=SCALES[kind])

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        return [NAMES[name] for name in storage.own_tensors(1, 1, bias)]

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        assert isinstance(storage, PackedFloat)
        return read(storage, NAMES, _typed(storage), tensors, inputs, outputs)

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        assert isinstance(storage, PackedFloat)
        alone = ALONE if storage.group_size is None else ()
        return write(NAMES, _typed(storage), {name: t.view(()) if name in alone else t for name, t in tensors.items()})

    def accepts(self, storage: Linear) -> list[str]:
        if not isinstance(storage, PackedFloat):
            return [f"fp8_block holds packed_float, not {storage.name}"]
        infos = {"weight": TensorInfo((), "float8_e4m3fn"), NAMES["scale"]: TensorInfo((), _on_disk(storage))}
        wanted = replace(storage, matmul=None)
        if _on_disk(storage) in SCALES and self.storage(_config(storage), "", infos) == wanted:
            return []
        hint = "quantize with scale_per='block' and inputs='group', or write compressed_tensors"
        return [f"fp8_block holds E4M3 by blocks or tensors with E4M3 inputs, not {dump(storage)}; {hint}"]

    def config(self, storages: Mapping[str, Linear]) -> dict[str, Any]:
        """Raises ValueError where modules differ, which the config cannot say."""
        packed = {name: replace(s, matmul=None) for name, s in storages.items() if isinstance(s, PackedFloat)}
        first = next(iter(packed))
        other = next((name for name, storage in packed.items() if storage != packed[first]), None)
        if other is not None:
            raise ValueError(f"fp8_block has one scheme for all modules, but {first} and {other} differ; write compressed_tensors")
        return _config(packed[first]) | {"modules_to_not_convert": [name for name in storages if name not in packed]}


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """[outputs, inputs] of a block, None for one scale per tensor. Raises ValueError where it is neither."""
    size = member(config, "weight_block_size", list, [], PLACE)
    if not size:
        return None
    if len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise ValueError(f"{PLACE}.weight_block_size must be [rows, columns] or null, it is {size!r:.60}")
    return size[0], size[1]


def _dynamic(channels: int | None, powers: bool) -> FloatInputs:
    """Scales of the inputs; DeepSeek-V3.1 takes the next power of two (``scale_fmt: ue8m0``)."""
    return FloatInputs(group_size=channels, scale="e8m0", scale_rule="ceil") if powers else FloatInputs(group_size=channels)


def _config(storage: PackedFloat) -> dict[str, Any]:
    size = None if storage.group_size is None else [storage.group_outputs, storage.group_size]
    powers = storage.inputs is not None and storage.inputs.scale == "e8m0"
    static = storage.inputs is not None and storage.inputs.scale is None
    found = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": SCHEMES[static], "weight_block_size": size}
    return found | ({"scale_fmt": "ue8m0"} if powers else {})


def _on_disk(storage: PackedFloat) -> str:
    return next((theirs for theirs, ours in SCALES.items() if ours == storage.scale), storage.scale)


def _typed(storage: PackedFloat) -> Typed:
    return {"packed": WEIGHT} | ({"scale": POWER} if storage.scale == "e8m0" else {})
