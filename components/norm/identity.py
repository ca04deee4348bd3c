"""No normalisation, for parts that ask for a norm where a model has none."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import Norm
from zoo.components.registry import part


@part(Norm, "identity", source="torch.nn.Identity")
@dataclass(frozen=True, kw_only=True)
class Identity(Norm):
    """The input as it is."""

    def build(self, width: int) -> nn.Module:
        return IdentityNorm()


class IdentityNorm(nn.Module):
    """[..., width] -> the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def reference(self, x: Tensor) -> Tensor:
        return x
