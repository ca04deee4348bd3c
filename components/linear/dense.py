"""A weight matrix as it is: one element per weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Linear
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Linear, "dense", source="torch.nn.Linear")
@dataclass(frozen=True, kw_only=True)
class Dense(Linear):
    """One floating-point element per weight, in the model's dtype."""

    def own_tensors(self, inputs: int, outputs: int, bias: bool) -> dict[str, TensorInfo]:
        weight = {"weight": TensorInfo((outputs, inputs))}
        return weight | ({"bias": TensorInfo((outputs,))} if bias else {})

    def build(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        return DenseLinear(inputs, outputs, bias)


class DenseLinear(nn.Linear):
    """[..., inputs] -> [..., outputs]."""

    @property
    def inputs(self) -> int:
        return self.in_features

    @property
    def outputs(self) -> int:
        return self.out_features

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.weight if dtype is None else self.weight.to(dtype)
