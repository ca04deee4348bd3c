"""``mxfp4-pack-quantized``, ``mxfp6-pack-quantized`` and ``mxfp8-quantized``: groups of 32 with powers of two as scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from zoo.components.linear.packed_float import PackedFloat
from zoo.components.spec import TensorInfo
from zoo.quantize.formats._float_tensors import Names, Typed
from zoo.quantize.formats.compressed_tensors._floats import BYTE, NAMES, FloatScheme, element_of
from zoo.quantize.formats.compressed_tensors._scheme import Allowed

GROUP = 32


class Microscaled(FloatScheme):
    """Scales are bytes, the exponent plus 127."""

    def weight(self, arguments: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> PackedFloat:
        return PackedFloat(element=element_of(arguments["num_bits"]), group_size=GROUP, scale="e8m0")

    def weight_arguments(self, storage: PackedFloat) -> dict[str, Any]:
        return {"strategy": "group", "group_size": storage.group_size, "scale_dtype": BYTE}


class MXFP4(Microscaled):
    """E2M1, packed as in NVFP4."""

    formats = ("mxfp4-pack-quantized",)
    weights: ClassVar[Allowed] = {"num_bits": (4,), "strategy": ("group",), "group_size": (GROUP,), "scale_dtype": (None, BYTE)}


class MXFP6(Microscaled):
    """E2M3, four codes in three bytes."""

    formats = ("mxfp6-pack-quantized",)
    weights: ClassVar[Allowed] = {"num_bits": (6,), "strategy": ("group",), "group_size": (GROUP,), "scale_dtype": (None, BYTE)}


class MXFP8(Microscaled):
    """E4M3."""

    formats = ("mxfp8-quantized",)
    weights: ClassVar[Allowed] = {"num_bits": (8,), "strategy": ("group",), "group_size": (GROUP,), "scale_dtype": (BYTE,)}
    typed: ClassVar[Typed] = {"packed": torch.float8_e4m3fn}
    names: ClassVar[Names] = NAMES | {"packed": "weight"}
