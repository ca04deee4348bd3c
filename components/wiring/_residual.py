"""What all wirings share: how the output of a branch is added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo.components.contracts import Wiring
from zoo.components.spec import Child, Spec, TensorInfo


@dataclass(frozen=True, kw_only=True)
class Residual(Wiring):
    """scale: multiplies what each branch adds to the stream (Granite's residual multiplier).

    layer_scale: first value of a learned factor for each channel and branch (CaiT, arXiv:2103.17239, section 2.1); None for none.
    The layer holds them as ``mixer_scale.weight`` and ``mlp_scale.weight``.
    """

    branches: ClassVar[tuple[str, ...]] = ("mixer", "mlp")

    scale: float = 1.0
    layer_scale: float | None = None

    def children(self, width: int) -> dict[str, Child]:
        if self.layer_scale is None:
            return {}
        return {f"{branch}_scale": Child(ChannelScale(start=self.layer_scale), (width,)) for branch in self.branches}

    def scaled(self, layer: Any, branch: str, y: Tensor) -> Tensor:
        """The output y of a branch, as it is to be added to the stream."""
        if self.layer_scale is not None:
            y = getattr(layer, f"{branch}_scale")(y)
        return y if self.scale == 1.0 else y * self.scale


@dataclass(frozen=True, kw_only=True)
class ChannelScale(Spec):
    """A learned factor for each channel."""

    start: float

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return {"weight": TensorInfo((width,))}

    def build(self, width: int) -> nn.Module:
        return ChannelScaleModule(self, width)


class ChannelScaleModule(nn.Module):
    """[..., width] -> [..., width]."""

    def __init__(self, spec: ChannelScale, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), spec.start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight
