"""Group norm."""

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


@part(Norm, "group", source="Wu & He 2018, arXiv:1803.08494; per token as in RetNet, arXiv:2307.08621", example={"groups": 2})
@dataclass(frozen=True, kw_only=True)
class Group(Norm):
    """Layer norm within each of several equal runs of channels of a token, then weight and bias over all channels.

    groups: how many runs; or size: channels of one, so that the number follows the width (a head each in StableLM). affine: False
    for a norm without weight and bias. bias: False for a norm with a weight only.
    """

    groups: int | None = None
    size: int | None = None
    eps: float = 1e-5
    affine: bool = True
    bias: bool = True

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        yield from eps_problems(self.eps)
        if (self.groups is None) == (self.size is None):
            yield "groups", "give either groups or size"
        for name in ("groups", "size"):
            value = getattr(self, name)
            if value is not None and (value < 1 or width % value):
                yield name, f"must divide the width {width}, got {value}"

    def count(self, width: int) -> int:
        """Groups in a width."""
        return self.groups or width // (self.size or width)

    def together(self, width: int) -> int:
        return width // self.count(width)

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        names = ("weight", "bias") if self.bias else ("weight",)
        return {name: TensorInfo((width,)) for name in names if self.affine}

    def build(self, width: int) -> nn.Module:
        return GroupNorm(self, width)


class GroupNorm(nn.Module):
    """[..., width] -> [..., width] in the input's dtype."""

    def __init__(self, spec: Group, width: int):
        super().__init__()
        self.spec, self.groups = spec, spec.count(width)
        self.weight = nn.Parameter(torch.ones(width)) if spec.affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if spec.affine and spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        return F.group_norm(tokens, self.groups, self.weight, self.bias, self.spec.eps).view(x.shape)

    def reference(self, x: Tensor) -> Tensor:
        """The formula, step by step."""
        wide = torch.promote_types(x.dtype, torch.float32)
        grouped = x.to(wide).unflatten(-1, (self.groups, -1))
        centred = grouped - grouped.mean(-1, keepdim=True)
        y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.spec.eps)).flatten(-2)
        if self.weight is not None:
            y = y * self.weight.to(wide)
        if self.bias is not None:
            y = y + self.bias.to(wide)
        return y.to(x.dtype)
