"""Group norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Norm
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Norm, "group", source="Wu & He 2018, arXiv:1803.08494; per token as in RetNet, arXiv:2307.08621", example={"groups": 2})
@dataclass(frozen=True, kw_only=True)
class Group(Norm):
    """Layer norm within each of ``groups`` runs of channels of a token, then weight and bias over all channels."""

    groups: int
    eps: float = 1e-5
    affine: bool = True

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        if self.groups < 1 or width % self.groups:
            yield "groups", f"must divide the width {width}, got {self.groups}"

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return {name: TensorInfo((width,)) for name in ("weight", "bias") if self.affine}

    def build(self, width: int) -> nn.Module:
        return GroupNorm(self, width)


class GroupNorm(nn.Module):
    """[..., width] -> [..., width] in the input's dtype."""

    def __init__(self, spec: Group, width: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.ones(width)) if spec.affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if spec.affine else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        return F.group_norm(tokens, self.spec.groups, self.weight, self.bias, self.spec.eps).view(x.shape)

    def reference(self, x: Tensor) -> Tensor:
        """The formula, step by step."""
        wide = torch.promote_types(x.dtype, torch.float32)
        grouped = x.to(wide).unflatten(-1, (self.spec.groups, -1))
        centred = grouped - grouped.mean(-1, keepdim=True)
        y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.spec.eps)).flatten(-2)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight.to(wide) + self.bias.to(wide)
        return y.to(x.dtype)
