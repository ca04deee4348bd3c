"""A weight matrix as it is: one element per weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Linear, Prepared
from zoo.components.ops.few_rows import PARTS, few_rows, suits
from zoo.components.registry import part
from zoo.components.spec import TensorInfo

SMALL = 1 << 16  # weights that the processor's own cache holds gain nothing from an arrangement


@part(Linear, "dense", source="torch.nn.Linear")
@dataclass(frozen=True, kw_only=True)
class Dense(Linear):
    """One floating-point element per weight, in the model's dtype."""

    def own_tensors(self, inputs: int, outputs: int, bias: bool) -> dict[str, TensorInfo]:
        weight = {"weight": TensorInfo((outputs, inputs))}
        return weight | ({"bias": TensorInfo((outputs,))} if bias else {})

    def build(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        return DenseLinear(inputs, outputs, bias)


class DenseLinear(nn.Linear, Prepared):
    """[..., inputs] -> [..., outputs].

    The weight lies row by row, or column by column where that reads faster for the few rows of decoding; only its strides tell.
    """

    prepared = False  # once it was, every move and cast looks anew which way to lie

    @property
    def inputs(self) -> int:
        return self.in_features

    @property
    def outputs(self) -> int:
        return self.out_features

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.weight if dtype is None else self.weight.to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        if suits(input, self.weight):
            y = few_rows(input.reshape(-1, self.in_features), self.weight).view(*input.shape[:-1], self.out_features)
            return y if self.bias is None else y + self.bias
        return F.linear(input, self.weight, self.bias)

    def prepare(self) -> None:
        weight = self.weight
        if weight.device.type == "meta" or weight.untyped_storage().nbytes() != weight.nbytes:
            return  # a view of something larger (stacked experts) stays where it is
        self.prepared = True
        if self.rearranges(weight):
            weight.data = weight.data.t().contiguous().t()
        else:
            weight.data = weight.data.contiguous()

    def rearranges(self, tensor: Tensor) -> bool:
        suits = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and torch.backends.mkl.is_available()
        return suits and tensor.numel() >= SMALL and self.in_features % PARTS == 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DenseLinear:
        super()._apply(fn, recurse)
        if self.prepared:
            self.prepare()
        return self
