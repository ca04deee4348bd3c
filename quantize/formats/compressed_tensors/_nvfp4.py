"""``nvfp4-pack-quantized``: E2M1 with E4M3 scales for groups of 16, which a number for the tensor divides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from zoo.components.linear.packed_float import PackedFloat
from zoo.components.spec import TensorInfo
from zoo.quantize.formats._float_tensors import Typed
from zoo.quantize.formats.compressed_tensors._floats import E4M3, FloatScheme
from zoo.quantize.formats.compressed_tensors._scheme import Allowed

GROUP = 16


class NVFP4(FloatScheme):
    """The even column of a pair is the low half of its byte."""

    formats = ("nvfp4-pack-quantized",)
    weights: ClassVar[Allowed] = {"num_bits": (4,), "strategy": ("tensor_group",), "group_size": (GROUP,), "scale_dtype": (None, E4M3)}
    typed: ClassVar[Typed] = {"scale": torch.float8_e4m3fn}

    def weight(self, arguments: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> PackedFloat:
        return PackedFloat(element="e2m1", group_size=GROUP, scale="e4m3", tensor_scale="divisor")

    def weight_arguments(self, storage: PackedFloat) -> dict[str, Any]:
        return {"strategy": "tensor_group", "group_size": storage.group_size, "scale_dtype": E4M3}
