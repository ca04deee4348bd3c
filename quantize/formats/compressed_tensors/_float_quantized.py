"""``float-quantized`` and ``naive-quantized``: FP8 weights, with or without FP8 inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.packed_float import PackedFloat
from zoo.components.numerics.scaled import ScaleName
from zoo.components.spec import TensorInfo
from zoo.formats import member
from zoo.quantize.formats._float_tensors import Names, Typed
from zoo.quantize.formats.compressed_tensors._floats import NAMES, FloatScheme
from zoo.quantize.formats.compressed_tensors._scheme import Allowed, Group, raise_for

SCALES: dict[str | None, ScaleName] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}  # dtype on disk -> ours


class FloatQuantized(FloatScheme):
    """E4M3 with scales for the tensor, for channels, groups, or blocks of outputs and inputs.

    The library calls weights without rounded inputs ``naive-quantized``.
    """

    formats = ("float-quantized", "naive-quantized")
    weights: ClassVar[Allowed] = {"num_bits": (8,), "strategy": ("tensor", "channel", "group", "block"), "scale_dtype": (None,)}
    typed: ClassVar[Typed] = {"packed": torch.float8_e4m3fn}
    names: ClassVar[Names] = NAMES | {"packed": "weight"}

    def storage(self, group: Group, place: str, tensors: Mapping[str, TensorInfo]) -> PackedFloat:
        weights = member(group, "weights", Mapping, {}, place)
        shape, strategy = weights.get("block_structure"), weights.get("strategy")
        if shape is not None and not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)):
            raise_for(place, iter([f"weights.block_structure must be [outputs, inputs], it is {shape!r:.60}"]))
        if (shape is None) == (strategy == "block"):
            why = "is missing" if shape is None else f"is for the strategy block, not for {strategy!r:.60}"
            raise_for(place, iter([f"weights.block_structure {why}"]))
        return super().storage(group, place, tensors)

    def weight(self, arguments: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> PackedFloat:
        size, strategy = arguments.get("group_size"), arguments["strategy"]
        outputs, inputs = {"tensor": (None, None), "channel": (1, None), "group": (1, size)}.get(strategy) or arguments["block_structure"]
        scale = SCALES.get(tensors.get(NAMES["scale"], TensorInfo(())).dtype, "float32")
        return PackedFloat(element="e4m3", group_outputs=outputs, group_size=inputs, scale=scale)

    def weight_arguments(self, storage: PackedFloat) -> dict[str, Any]:
        shape = (storage.group_outputs, storage.group_size)
        if shape in ((None, None), (1, None)):
            return {"strategy": "channel" if storage.group_outputs else "tensor"}
        if storage.group_outputs == 1:
            return {"strategy": "group", "group_size": storage.group_size}
        return {"strategy": "block", "block_structure": list(shape)}

    def group(self, storage: Linear) -> dict[str, Any]:
        found = super().group(storage)
        return found if found["input_activations"] else found | {"format": "naive-quantized"}

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        found = super().encode(storage, tensors, inputs, outputs)
        assert isinstance(storage, PackedFloat)
        one = storage.group_outputs is None and storage.group_size is None
        return found | {"weight_scale": found["weight_scale"].view(1)} if one else found
