"""Batch norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Norm
from zoo.components.norm._eps import eps_problems
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Norm, "batch", source="Ioffe & Szegedy 2015, arXiv:1502.03167")
@dataclass(frozen=True, kw_only=True)
class Batch(Norm):
    """Each channel by its mean and variance over the batch in training, by running averages of them otherwise.

    eps: added to the variance. momentum: share of the new statistics in the running averages. All tokens count, so inputs are to
    have no padding, as images have none.
    """

    eps: float = 1e-5
    momentum: float = 0.1
    affine: bool = True

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        yield from eps_problems(self.eps)

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        names = ("weight", "bias") if self.affine else ()
        return {name: TensorInfo((width,)) for name in (*names, "running_mean", "running_var")}

    def build(self, width: int) -> nn.Module:
        return BatchNorm(self, width)


class BatchNorm(nn.Module):
    """[..., width] -> [..., width] in the input's dtype. Training updates the buffers running_mean and running_var (unbiased)."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, spec: Batch, width: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.ones(width)) if spec.affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if spec.affine else None
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        flat = x.reshape(-1, x.shape[-1])
        y = F.batch_norm(flat, *statistics, self.weight, self.bias, self.training, self.spec.momentum, self.spec.eps)
        return y.view(x.shape)

    def reference(self, x: Tensor) -> Tensor:
        """The formula, step by step; leaves the running averages as they are."""
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, variance = self.running_mean.to(wide), self.running_var.to(wide)
        if self.training:
            variance, mean = torch.var_mean(x.to(wide).reshape(-1, x.shape[-1]), 0, correction=0)
        y = (x.to(wide) - mean) * torch.rsqrt(variance + self.spec.eps)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight.to(wide) + self.bias.to(wide)
        return y.to(x.dtype)
