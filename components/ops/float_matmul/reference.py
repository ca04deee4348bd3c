"""The plain product: decode, round the inputs, multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.numerics import floats, scaled
from zoo.components.ops.float_matmul import FloatMatmul, Form, Held, tensor_scale
from zoo.components.registry import part


@part(FloatMatmul, "reference", source="torch.nn.functional.linear")
@dataclass(frozen=True, kw_only=True)
class Reference(FloatMatmul):
    """Any weight on any device: in the activation's dtype, or in float32, and so exactly, where the inputs are rounded."""

    def refuses(self, form: Form, device: torch.device) -> list[str]:
        return []

    def product(self, form: Form, held: Held, x: Tensor) -> Tensor:
        if form.input_grid is None:
            return F.linear(x, dense(form, held, x.dtype))
        near = scaled.rounded_tokens(x, form.input_grid, tensor_scale(held, "input_"))
        return F.linear(near, dense(form, held, torch.float32)).to(x.dtype)


def dense(form: Form, held: Held, dtype: torch.dtype) -> Tensor:
    """The weight [N, K], computed in float32 and rounded once to ``dtype``."""
    numbers = floats.numbers(held["packed"], form.grid.element, form.inputs)
    return scaled.times(numbers, weight_scale(form, held), form.grid).to(dtype)


def weight_scale(form: Form, held: Held) -> Tensor:
    """The effective scales of the weight, float32 [R, C]."""
    return scaled.effective(held.get("scale"), tensor_scale(held), form.grid)
