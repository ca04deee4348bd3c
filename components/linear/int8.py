"""A weight matrix as integers of 8 bits that is multiplied by inputs in integers of 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear._held import NOT_POSITIVE, HeldLinear, positive
from zoo.components.numerics import int8, integer
from zoo.components.ops.int8_matmul import Int8Matmul, choose
from zoo.components.ops.straight_through import straight_through
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Linear, "int8", source="Xiao et al. 2022, arXiv:2211.10438 (SmoothQuant), section 3; compressed-tensors int-quantized")
@dataclass(frozen=True, kw_only=True)
class Int8(Linear):
    """code * scale with a scale for each output; inputs are rounded to 8 bits and the product is of integers, with exact sums.

    inputs: each token has the scale that spans its own range, or all have one that is stored ("tensor"). scale_dtype: of the weight's
    scales. matmul: the product, None is the fastest that accepts.
    """

    inputs: Literal["token", "tensor"] = "token"
    scale_dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    matmul: Int8Matmul | None = None

    @property
    def grid(self) -> integer.Grid:
        return integer.Grid(8, None, True, getattr(torch, self.scale_dtype))

    def own_tensors(self, inputs: int, outputs: int, bias: bool) -> dict[str, TensorInfo]:
        held = {"weight": TensorInfo((outputs, inputs), "int8"), "scale": TensorInfo((outputs, 1), self.scale_dtype)}
        if self.inputs == "tensor":
            held["input_scale"] = TensorInfo((1,), "float32")
        return held | ({"bias": TensorInfo((outputs,))} if bias else {})

    def faults(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        if "input_scale" in tensors and not positive(tensors["input_scale"]):
            yield "input_scale", NOT_POSITIVE

    def build(self, inputs: int, outputs: int, bias: bool) -> Int8Linear:
        return Int8Linear(self, inputs, outputs, bias)

    def encode(self, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """The tensors of codes [outputs, inputs] uint8 about the middle, and their scale [outputs, 1]; the scale of inputs aside."""
        return {"weight": (codes - self.grid.middle).view(torch.int8), "scale": scale}


class Int8Linear(HeldLinear):
    """[..., inputs] -> [..., outputs] in the dtype of the input; gradients pass the rounding of inputs as if it were not there."""

    spec: Int8
    weight: Tensor
    scale: Tensor
    input_scale: Tensor
    matmul: Int8Matmul

    def __init__(self, spec: Int8, inputs: int, outputs: int, bias: bool):
        super().__init__(spec, inputs, outputs, bias)
        self.prepare()

    def forward(self, x: Tensor) -> Tensor:
        return self.biased(straight_through(x, self.product, self.dense_weight))

    def product(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], the bias aside."""
        rows = x.reshape(-1, self.inputs)
        scale = int8.fit_rows(rows) if self.spec.inputs == "token" else self.input_scale[None]
        sums = self.matmul.product(int8.quantize(rows, scale), self.weight)
        y = sums.float().mul_(scale).mul_(self.scale.float().t())
        return y.to(x.dtype).view(*x.shape[:-1], self.outputs)

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[outputs, inputs], by default in float32; rounded once."""
        return integer.dequantize(self.weight, self.scale, 0, dtype or torch.float32)

    def prepare(self) -> None:
        """Choose the product that suits the device. Raises ValueError if one that was named refuses."""
        named = None if self.weight.is_meta else self.spec.matmul  # nothing is multiplied where no tensor is
        self.matmul = choose(named, self.inputs, self.outputs, self.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        super()._apply(fn, recurse)
        self.prepare()
        return self
