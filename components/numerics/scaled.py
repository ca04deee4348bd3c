"""Matrices of few-bit floats with scales: number * scale, and for two-level scales number * scale * tensor scale.

Shapes: x [N, K]; scales [R, C], one for each block of ``rows`` by ``columns`` (blocks at the edges may be cut); tensor scale [1].
For activations [..., K] every token is a row. Scales are computed in float32 whatever the dtype of x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.numerics import e8m0, floats
from zoo.components.numerics.e8m0 import Rule
from zoo.components.numerics.floats import ELEMENTS, Element

ScaleName = Literal["float32", "bfloat16", "float16", "e8m0", "e4m3"]
TensorScale = Literal["divisor", "multiplier"]
E4M3 = ELEMENTS["e4m3"]
LEAST_E4M3 = 2.0**-9  # its smallest number above 0


@dataclass(frozen=True)
class Grid:
    """What a matrix is rounded to.

    rows, columns: those that share a scale, None for all. scale: how scales are stored, None where the tensor scale is the only one.
    tensor_scale: a number for the whole tensor that scales are divided by (as compressed-tensors stores it) or multiplied with (as
    ModelOpt does), None without. rule: how a scale of E8M0 is taken from the largest magnitude.
    """

    element: Element
    rows: int | None = 1
    columns: int | None = None
    scale: ScaleName | None = "float32"
    tensor_scale: TensorScale | None = None
    rule: Rule = "round"

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """[R, C] of the scales of a matrix."""
        return -(-rows // (self.rows or rows)), -(-columns // (self.columns or columns))

    @property
    def span(self) -> float:
        """The largest magnitude that a tensor scale of 1 can hold."""
        return self.element.largest * (E4M3.largest if self.scale == "e4m3" else 1)


def fit_tensor(largest: Tensor, grid: Grid, span: float | None = None) -> Tensor:
    """The tensor scale [1] float32 that lets the largest magnitude (a scalar) become ``span``, by default the grid's own; 1 for 0."""
    span = span or grid.span
    largest = largest.float().reshape(1)
    fitted = span / largest if grid.tensor_scale == "divisor" else largest / span
    return fitted.where(fitted.isfinite() & (fitted > 0), 1)


def fit(x: Tensor, grid: Grid, tensor: Tensor | None = None) -> Tensor:
    """The stored scales [R, C] with which each block's largest magnitude becomes the element's. tensor: the tensor scale [1]."""
    return store(largest(x, grid), grid, tensor)


def store(most: Tensor, grid: Grid, tensor: Tensor | None = None) -> Tensor:
    """The stored scales of blocks whose largest magnitudes are ``most`` [R, C]; those in 8 bits are uint8. Never 0 or infinite."""
    if grid.scale == "e8m0":
        return e8m0.encode(most, grid.element, grid.rule)
    scale = most / grid.element.largest
    if grid.scale == "e4m3":
        return floats.encode(_under(scale, grid, tensor).clamp(LEAST_E4M3, E4M3.largest), E4M3)
    kind = getattr(torch, str(grid.scale))
    return scale.clamp(torch.finfo(kind).tiny, torch.finfo(kind).max).to(kind)


def effective(stored: Tensor | None, tensor: Tensor | None, grid: Grid) -> Tensor:
    """What numbers are multiplied with, float32 [R, C]. stored, tensor: None where the grid has none."""
    if stored is None:
        scale = torch.ones(1, 1, device=tensor.device if tensor is not None else None)
    elif grid.scale in ("e8m0", "e4m3"):
        scale = e8m0.decode(stored) if grid.scale == "e8m0" else floats.decode(stored, E4M3)
    else:
        scale = stored.float()
    if tensor is None:
        return scale
    return scale / tensor if grid.tensor_scale == "divisor" else scale * tensor


def codes(x: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """The nearest codes, uint8 [N, K], for effective scales."""
    blocks, scales = _aligned(x.float(), scale, grid)
    return floats.encode(blocks / scales, grid.element).view(x.shape)


def rounded(x: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """The nearest multiples of the effective scales, float32 [N, K]."""
    blocks, scales = _aligned(x.float(), scale, grid)
    return floats.rounded(blocks / scales, grid.element).mul_(scales).view(x.shape)


def times(numbers: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """numbers [N, K] float32, which are overwritten, times effective scales."""
    blocks, scales = _aligned(numbers, scale, grid)
    return blocks.mul_(scales).view(numbers.shape)


def rounded_tokens(x: Tensor, grid: Grid, tensor: Tensor | None = None) -> Tensor:
    """[..., K] rounded with scales that each token, or group of its channels, has of its own: float32. tensor: a fixed one for all."""
    rows = x.reshape(-1, x.shape[-1])
    return rounded(rows, token_scales(rows, grid, tensor), grid).view(x.shape)


def token_scales(rows: Tensor, grid: Grid, tensor: Tensor | None = None) -> Tensor:
    """The effective scales of activations [M, K]: [M, C], or [1, 1] where the tensor scale is the only one."""
    return effective(None if grid.scale is None else fit(rows, grid, tensor), tensor, grid)


def largest(x: Tensor, grid: Grid) -> Tensor:
    """The largest magnitude of each block, float32 [R, C]; NaN where a block has NaN."""
    rows, columns = x.shape
    high = min(grid.rows or rows, rows) or 1  # a block larger than the matrix is cut, and needs no padding
    wide = min(grid.columns or columns, columns)
    padded = F.pad(x.float(), (0, -columns % wide, 0, -rows % high))
    return padded.unflatten(-1, (-1, wide)).unflatten(0, (-1, high)).abs().amax((1, 3))


def _aligned(x: Tensor, scale: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """x [N, K], in blocks of columns where they are whole, and its scales [R, C], as they multiply number by number."""
    rows, columns = x.shape
    if scale.shape[0] > 1:
        scale = scale.repeat_interleave(min(grid.rows or rows, rows), 0)[:rows]
    if scale.shape[1] == 1:
        return x, scale
    wide = grid.columns or columns
    if columns % wide == 0:
        return x.unflatten(-1, (-1, wide)), scale[..., None]
    return x, scale.repeat_interleave(wide, 1)[:, :columns]


def _under(scale: Tensor, grid: Grid, tensor: Tensor | None) -> Tensor:
    """A scale less what the tensor scale does of it."""
    if tensor is None:
        return scale
    return tensor * scale if grid.tensor_scale == "divisor" else scale / tensor
