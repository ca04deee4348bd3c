"""A weight matrix as integers of few bits, evenly spaced about zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear._held import HeldLinear
from zoo.components.numerics import integer, mid_rise
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Linear, "mid_rise", source="Chee et al. 2023, arXiv:2307.13304 (QuIP), section 3.1")
@dataclass(frozen=True, kw_only=True)
class MidRise(Linear):
    """Values +-1/2, +-3/2, ... times one step for the whole matrix, packed densely."""

    bits: mid_rise.Bits = 2

    def own_tensors(self, inputs: int, outputs: int, bias: bool) -> dict[str, TensorInfo]:
        packed = TensorInfo((outputs, integer.packed_size(inputs, self.bits)), "int32")
        held = {"packed": packed, "scale": TensorInfo((1,), "float32")}
        return held | ({"bias": TensorInfo((outputs,))} if bias else {})

    def build(self, inputs: int, outputs: int, bias: bool) -> MidRiseLinear:
        return MidRiseLinear(self, inputs, outputs, bias)

    def encode(self, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """The tensors of codes [outputs, inputs] uint8 and a step [1]."""
        return {"packed": integer.pack(codes, self.bits), "scale": scale}


class MidRiseLinear(HeldLinear):
    """[..., inputs] -> [..., outputs]. Codes are exact in the dtype of the input; the step is applied to the product."""

    spec: MidRise
    packed: Tensor
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        values = mid_rise.decode(integer.unpack(self.packed, self.spec.bits, self.inputs), self.spec.bits, x.dtype)
        return self.biased((F.linear(x, values) * self.scale).to(x.dtype))

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[outputs, inputs], by default in float32; rounded once."""
        wide = torch.promote_types(dtype or torch.float32, torch.float32)
        codes = integer.unpack(self.packed, self.spec.bits, self.inputs)
        return mid_rise.decode(codes, self.spec.bits, wide).mul_(self.scale).to(dtype or torch.float32)
