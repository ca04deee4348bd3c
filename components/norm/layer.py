"""Layer norm."""

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


@part(Norm, "layer", source="Ba et al. 2016, arXiv:1607.06450")
@dataclass(frozen=True, kw_only=True)
class Layer(Norm):
    """Layer norm: (x - mean) / sqrt(variance + eps) * (weight + offset) + bias; everything up to the result is fp32.

    eps: added to the variance. offset: added to the stored weight (1 in Nemotron). affine: False for a norm without weight and
    bias (OLMo). bias: False for a norm with a weight only (Cohere).
    """

    eps: float = 1e-5
    offset: float = 0.0
    affine: bool = True
    bias: bool = True

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        yield from eps_problems(self.eps)

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        names = ("weight", "bias") if self.bias else ("weight",)
        return {name: TensorInfo((width,)) for name in names if self.affine}

    def build(self, width: int) -> nn.Module:
        return LayerNorm(self, width)


class LayerNorm(nn.Module):
    """[..., width] -> [..., width] in the input's dtype."""

    def __init__(self, spec: Layer, width: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.full((width,), 1.0 - spec.offset)) if spec.affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if spec.affine and spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None or self.spec.offset == 0:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.spec.eps)
        wide = torch.promote_types(x.dtype, torch.float32)  # 1 + w rounded to bf16 loses the small weights
        weight, bias = self.weight.to(wide) + self.spec.offset, None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, self.spec.eps).to(x.dtype)

    def reference(self, x: Tensor) -> Tensor:
        """The formula, step by step."""
        wide = torch.promote_types(x.dtype, torch.float32)
        centred = x.to(wide) - x.to(wide).mean(-1, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.spec.eps)
        if self.weight is not None:
            y = y * (self.weight.to(wide) + self.spec.offset)
        if self.bias is not None:
            y = y + self.bias.to(wide)
        return y.to(x.dtype)
