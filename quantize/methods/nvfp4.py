"""NVFP4: groups of 16 that share an E4M3 scale, under one float32 scale for the tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zoo.components.linear.packed_float import FloatInputs, PackedFloat
from zoo.components.numerics import scaled
from zoo.components.numerics.scaled import Grid, TensorScale
from zoo.components.registry import part
from zoo.quantize.contracts import Quantizer
from zoo.quantize.methods._float import FloatQuantizer

GROUP = 16
FOUR_OVER_SIX = 256.0  # the largest group scale, which leaves room for its 1.5-fold below 448


@part(Quantizer, "nvfp4", source="NVIDIA 2025, arXiv:2509.25149, section 2; four_over_six: Cook et al. 2025, arXiv:2512.02010")
@dataclass(frozen=True, kw_only=True)
class NVFP4(FloatQuantizer):
    """4-bit floats (E2M1) with an E4M3 scale per 16 inputs and a float32 scale for the tensor.

    round_inputs: they are rounded likewise, token by token, under a fixed scale from calibration data. four_over_six: a group's largest
    magnitude becomes 6 or 4, whichever errs less. tensor_scale: how it is stored: "divisor" for compressed-tensors, "multiplier" for
    ModelOpt. largest: the magnitude that the tensor scale spans, None: the weight's own; modules that engines fuse share one.
    """

    round_inputs: bool = False
    four_over_six: bool = False
    tensor_scale: TensorScale = "divisor"
    largest: float | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.largest is not None and self.largest <= 0:
            yield "largest", f"must be above 0, got {self.largest}"

    @property
    def storage(self) -> PackedFloat:
        inputs = FloatInputs(element="e2m1", group_size=GROUP, scale="e4m3", tensor_scale=self.tensor_scale)
        return PackedFloat(
            element="e2m1",
            group_size=GROUP,
            scale="e4m3",
            tensor_scale=self.tensor_scale,
            inputs=inputs if self.round_inputs else None,
        )

    def for_siblings(self, weights: Sequence[Tensor]) -> NVFP4:
        return replace(self, largest=max(float(weight.abs().amax()) for weight in weights) or None)

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        grid = self.storage.grid
        largest = weight.abs().amax() if self.largest is None else torch.tensor(self.largest, device=weight.device)
        if not self.four_over_six:
            tensor = scaled.fit_tensor(largest, grid)
            return scaled.fit(weight, grid, tensor), tensor
        tensor = scaled.fit_tensor(largest, grid, FOUR_OVER_SIX * grid.element.largest)
        return four_over_six(weight, grid, tensor), tensor


def four_over_six(weight: Tensor, grid: Grid, tensor: Tensor) -> Tensor:
    """For each group of a weight [N, K] the stored scale, [N, K / 16], that lets its largest magnitude become 6 or 4."""
    most = scaled.largest(weight, grid)
    six, four = (scaled.store(span, grid, tensor) for span in (most, most * 1.5))
    errors = [_squared_error(weight, scaled.effective(scale, tensor, grid), grid) for scale in (six, four)]
    return torch.where(errors[1] < errors[0], four, six)


def _squared_error(weight: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """[N, K / 16]."""
    return (scaled.rounded(weight, scale, grid) - weight).square_().unflatten(-1, (-1, GROUP)).sum(-1)
