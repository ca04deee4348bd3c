"""Root-mean-square norm with the variants of published models as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Norm
from zoo.components.norm._eps import eps_problems
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Norm, "rms", source="Zhang & Sennrich 2019, arXiv:1910.07467")
@dataclass(frozen=True, kw_only=True)
class RMS(Norm):
    """Root-mean-square norm: x / sqrt(mean(x^2) + eps) * (weight + offset); the reduction is always fp32.

    eps: added to the mean square. offset: added to the stored weight (1 in Gemma). cast: where the result returns to the input
    dtype, ``before_weight`` (LLaMA) or ``after_weight`` (Gemma, OLMo-2). affine: False for a norm without weight.
    """

    eps: float = 1e-6
    offset: float = 0.0
    cast: Literal["before_weight", "after_weight"] = "before_weight"
    affine: bool = True

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        yield from eps_problems(self.eps)

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return {"weight": TensorInfo((width,))} if self.affine else {}

    def build(self, width: int) -> nn.Module:
        return RMSNorm(self, width)


class RMSNorm(nn.Module):
    """[..., width] -> [..., width] in the input's dtype."""

    def __init__(self, spec: RMS, width: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.full((width,), 1.0 - spec.offset)) if spec.affine else None

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.is_cuda:  # no cast to place, so the fused kernel says the same; on the CPU there is none
            return F.rms_norm(x, x.shape[-1:], self.scale(), self.spec.eps)
        return self.reference(x)

    def scale(self) -> Tensor | None:
        if self.weight is None or self.spec.offset == 0:
            return self.weight
        return self.weight.float() + self.spec.offset  # 1 + w rounded to bf16 loses the small weights

    def reference(self, x: Tensor) -> Tensor:
        """The formula, step by step, with the cast where the spec puts it."""
        wide = x.float()
        square = wide.square().sum(-1, keepdim=True).div_(x.shape[-1])  # mean() is three operators, which one token's time shows
        y = wide * square.add_(self.spec.eps).rsqrt_()
        weight = self.scale()
        if weight is None:
            return y.to(x.dtype)
        if self.spec.cast == "before_weight":
            return (y.to(x.dtype) * weight).to(x.dtype)
        return (y * weight.float()).to(x.dtype)
