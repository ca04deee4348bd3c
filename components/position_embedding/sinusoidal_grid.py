"""Fixed sines and cosines of row and column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import PositionEmbedding, Step
from zoo.components.registry import part


@part(PositionEmbedding, "sinusoidal_grid", source="He et al. 2021 (MAE), arXiv:2111.06377, appendix A.1 and the authors' code")
@dataclass(frozen=True, kw_only=True)
class SinusoidalGrid(PositionEmbedding):
    """Adds sines and cosines of one coordinate in the first half of the channels and of the other in the second.

    axes: the coordinates of ``Step.axes`` in that order; (1, 0), column first, is MAE's own code, transformers has (0, 1). Tokens
    without a place in the grid (class, registers) are left as they are.
    """

    theta: float = 10_000.0
    axes: tuple[int, int] = (1, 0)

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        if width % 4:
            yield "", f"sine and cosine of two coordinates need a width that 4 divides, got {width}"
        if sorted(self.axes) != [0, 1]:
            yield "axes", f"must name both coordinates, 0 (row) and 1 (column), got {list(self.axes)}"
        if self.theta <= 0:
            yield "theta", f"must be positive, got {self.theta}"

    def build(self, width: int) -> nn.Module:
        return SinusoidalGridModule(self, width)


class SinusoidalGridModule(nn.Module):
    """(x [B, T, M], step) -> [B, T, M], by the two coordinates of ``Step.axes``. Holds no tensors."""

    def __init__(self, spec: SinusoidalGrid, width: int):
        super().__init__()
        self.spec, self.width = spec, width

    def forward(self, x: Tensor, step: Step) -> Tensor:
        places = step.coordinates(2)
        table = self.table(places.clamp(min=0)).masked_fill(places[..., :1] < 0, 0.0)
        return x + table.to(x.dtype)

    def table(self, places: Tensor) -> Tensor:
        """[..., 2] row and column -> [..., width] fp32."""
        waves = self.width // 4
        frequency = self.spec.theta ** -(torch.arange(waves, device=places.device).float() / waves)
        angle = places[..., list(self.spec.axes), None].float() * frequency
        return torch.cat([angle.sin(), angle.cos()], -1).flatten(-2)
