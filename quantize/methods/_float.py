"""What all methods on grids of few-bit floats share: rounding to nearest, and fixed scales for the inputs."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.linear.packed_float import PackedFloat
from zoo.components.numerics import scaled
from zoo.quantize.contracts import Quantized, Quantizer
from zoo.quantize.stats.hessian import Hessian


@dataclass(frozen=True, kw_only=True)
class FloatQuantizer(Quantizer):
    """Round each weight to the nearest point of its block's grid. Data is needed where inputs are rounded with a fixed scale only."""

    @property
    @abstractmethod
    def storage(self) -> PackedFloat: ...

    @property
    def calibrated(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] (here it depends on the settings)
        inputs = self.storage.inputs
        return inputs is not None and inputs.tensor_scale is not None

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stored scales of a weight [outputs, inputs], and the tensor scale where there is one."""
        return scaled.fit(weight, self.storage.grid), None

    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        return self.encoded(weight, *self.fit(weight), hessian)

    def encoded(self, weight: Tensor, scale: Tensor, tensor_scale: Tensor | None, hessian: Hessian | None) -> Quantized:
        """The weight rounded to nearest with these stored scales, and a fixed scale of the inputs where they have one."""
        tensors = self.storage.encode(weight, scale, tensor_scale)
        if not self.calibrated:
            return Quantized(tensors)
        seen = hessian is not None and hessian.tokens > 0
        largest = hessian.largest if hessian is not None and seen else torch.zeros((), device=weight.device)
        return Quantized(tensors | self._input_scale(largest), {} if seen else {"fallback": "inputs not scaled: no tokens"})

    def _input_scale(self, largest: Tensor) -> dict[str, Tensor]:
        """The fixed scale with which the largest input seen is still held; 1 where none was seen."""
        inputs = self.storage.inputs
        assert inputs is not None
        return {f"input_{inputs.tensor_scale}": scaled.fit_tensor(largest, inputs.grid)}
