"""No norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import Norm
from zoo.components.registry import part


@part(Norm, "none", source="post-norm models (BERT) have none before the head")
@dataclass(frozen=True, kw_only=True)
class NoNorm(Norm):
    """The input as it is."""

    def build(self, width: int) -> nn.Module:
        return NoNormModule()


class NoNormModule(nn.Module):
    """[..., width] -> the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def reference(self, x: Tensor) -> Tensor:
        return x
