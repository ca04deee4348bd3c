"""A weight matrix as packed integers of few bits whose zero points lie between the codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear._held import HeldLinear
from zoo.components.numerics import integer
from zoo.components.registry import part
from zoo.components.spec import TensorInfo

ZERO = torch.float16


@part(Linear, "offset_int", source="Badri and Shaji 2023, Half-Quadratic Quantization (HQQ); mobiusml/hqq, W = (code - zero) * scale")
@dataclass(frozen=True, kw_only=True)
class OffsetInt(Linear):
    """Integers of few bits with a scale and a float16 zero point per group, (code - zero) * scale.

    group_size: inputs that share them, None: one scale and zero point per output.
    """

    bits: Literal[2, 3, 4, 5, 6, 7, 8] = 4
    group_size: int | None = 64
    scale_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.scale_dtype)

    def groups(self, inputs: int) -> int:
        return inputs // self.group_size if self.group_size else 1

    def problems(self, inputs: int, outputs: int, bias: bool) -> Iterator[tuple[str, str]]:
        if self.group_size is not None and (self.group_size < 1 or inputs % self.group_size):
            yield "group_size", f"{inputs} inputs do not divide into groups of {self.group_size}"

    def own_tensors(self, inputs: int, outputs: int, bias: bool) -> dict[str, TensorInfo]:
        groups = (outputs, self.groups(inputs))
        held = {
            "packed": TensorInfo((outputs, integer.packed_size(inputs, self.bits)), "int32"),
            "scale": TensorInfo(groups, self.scale_dtype),
            "zero": TensorInfo(groups, "float16"),
        }
        return held | ({"bias": TensorInfo((outputs,))} if bias else {})

    def build(self, inputs: int, outputs: int, bias: bool) -> OffsetLinear:
        return OffsetLinear(self, inputs, outputs, bias)

    def encode(self, codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
        """The tensors of codes [outputs, inputs] uint8, scale and zero [outputs, groups] in their stored dtypes."""
        return {"packed": integer.pack(codes, self.bits), "scale": scale, "zero": zero}


class OffsetLinear(HeldLinear):
    """[..., inputs] -> [..., outputs]."""

    spec: OffsetInt
    packed: Tensor
    scale: Tensor
    zero: Tensor

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[outputs, inputs], by default in float32; computed there at least and rounded once."""
        wide = torch.promote_types(dtype or torch.float32, torch.float32)
        codes = integer.unpack(self.packed, self.spec.bits, self.inputs)
        return integer.dequantize(codes, self.scale.to(wide), self.zero.to(wide), wide).to(dtype or torch.float32)
