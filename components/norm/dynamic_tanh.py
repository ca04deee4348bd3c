"""Dynamic tanh, a layer without statistics in a norm's place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Norm
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Norm, "dynamic_tanh", source="Zhu et al. 2025, arXiv:2503.10622, section 4")
@dataclass(frozen=True, kw_only=True)
class DynamicTanh(Norm):
    """weight * tanh(alpha * x) + bias with one learned alpha, which starts at ``alpha``."""

    alpha: float = 0.5

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return {"alpha": TensorInfo((1,)), "weight": TensorInfo((width,)), "bias": TensorInfo((width,))}

    def build(self, width: int) -> nn.Module:
        return DynamicTanhModule(self, width)


class DynamicTanhModule(nn.Module):
    """[..., width] -> [..., width] in the input's dtype."""

    def __init__(self, spec: DynamicTanh, width: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), spec.alpha))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, self.weight, torch.tanh(self.alpha * x))

    def reference(self, x: Tensor) -> Tensor:
        """The formula, step by step."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return (self.weight.to(wide) * torch.tanh(self.alpha.to(wide) * x.to(wide)) + self.bias.to(wide)).to(x.dtype)
