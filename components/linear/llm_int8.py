"""A weight matrix as integers of 8 bits, multiplied in integers but for the columns where inputs are outliers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear._held import NEGATIVE, HeldLinear
from zoo.components.numerics import int8
from zoo.components.ops.outlier_matmul import OutlierMatmul, choose
from zoo.components.ops.straight_through import straight_through
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Linear, "llm_int8", source="Dettmers et al. 2022, arXiv:2208.07339; bitsandbytes 0.50")
@dataclass(frozen=True, kw_only=True)
class LLMInt8(Linear):
    """code * absmax / 127 with a largest magnitude for each output.

    Inputs are rounded to 8 bits token by token, save the columns where one of the call reaches ``threshold``, which are multiplied as
    they are: a token's result depends a little, within rounding, on those that it is computed with. threshold 0: no column is saved.
    matmul: the product, None is the fastest that accepts.
    """

    threshold: float = 6.0
    matmul: OutlierMatmul | None = None

    def problems(self, inputs: int, outputs: int, bias: bool) -> Iterator[tuple[str, str]]:
        if not 0 <= self.threshold < float("inf"):
            yield "threshold", f"must be 0 or above and finite, got {self.threshold}"

    def own_tensors(self, inputs: int, outputs: int, bias: bool) -> dict[str, TensorInfo]:
        held = {"weight": TensorInfo((outputs, inputs), "int8"), "absmax": TensorInfo((outputs,), "float32")}
        return held | ({"bias": TensorInfo((outputs,))} if bias else {})

    def faults(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        if bool((tensors["absmax"] < 0).any()):
            yield "absmax", NEGATIVE

    def build(self, inputs: int, outputs: int, bias: bool) -> LLMInt8Linear:
        return LLMInt8Linear(self, inputs, outputs, bias)


class LLMInt8Linear(HeldLinear):
    """[..., inputs] -> [..., outputs] in the dtype of the input; gradients pass the rounding of inputs as if it were not there."""

    spec: LLMInt8
    weight: Tensor
    absmax: Tensor
    matmul: OutlierMatmul

    def __init__(self, spec: LLMInt8, inputs: int, outputs: int, bias: bool):
        super().__init__(spec, inputs, outputs, bias)
        self.prepare()

    def forward(self, x: Tensor) -> Tensor:
        return self.biased(straight_through(x, self.product, self.dense_weight))

    def product(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], the bias aside."""
        rows = x.reshape(-1, self.inputs)
        return self.matmul.product(rows, self.weight, self.absmax, self.spec.threshold).view(*x.shape[:-1], self.outputs)

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[outputs, inputs], by default in float32."""
        return int8.decode_absmax(self.weight, self.absmax, dtype or torch.float32)

    def prepare(self) -> None:
        """Choose the product that suits the device. Raises ValueError if one that was named refuses."""
        named = None if self.weight.is_meta else self.spec.matmul  # nothing is multiplied where no tensor is
        self.matmul = choose(named, self.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LLMInt8Linear:
        super()._apply(fn, recurse)
        self.prepare()
        return self
