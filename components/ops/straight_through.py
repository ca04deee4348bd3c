"""Products whose rounding of the inputs passes gradients as if it were not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Dense = Callable[[torch.dtype], Tensor]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, product: Callable[[Tensor], Tensor], dense: Dense) -> Tensor:
        ctx.dense = dense
        return product(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ ctx.dense(grad.dtype), None, None


def straight_through(x: Tensor, product: Callable[[Tensor], Tensor], dense: Dense) -> Tensor:
    """``product(x)``, [..., K] -> [..., N], whose gradient is that of x W^T for the weight ``dense(dtype)`` [N, K]."""
    found = _StraightThrough.apply(x, product, dense)
    assert isinstance(found, Tensor)
    return found
