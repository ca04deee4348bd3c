"""The scaling of Llama 3.1 and later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.contracts import RopeScaling
from zoo.components.ops.rotary import frequencies
from zoo.components.registry import part
from zoo.components.rope_scaling._checks import positive


@part(
    RopeScaling,
    "llama3",
    source="Llama 3.1 model code (apply_scaling), as in transformers rope type 'llama3'",
    example={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "context": 8},
)
@dataclass(frozen=True, kw_only=True)
class Llama3(RopeScaling):
    """Long wavelengths are divided by ``factor``, short ones kept, those between are blended.

    A wavelength is long beyond context / low_freq_factor and short below context / high_freq_factor.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    context: int

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        yield from positive(self, "factor", "low_freq_factor", "high_freq_factor", "context")

    def frequencies(self, base: float, width: int, length: Tensor | None) -> Tensor:
        frequency = frequencies(base, width)
        wavelength = 2 * math.pi / frequency
        blend = (self.context / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - blend) * frequency / self.factor + blend * frequency
        scaled = torch.where(wavelength > self.context / self.low_freq_factor, frequency / self.factor, blended)
        return torch.where(wavelength < self.context / self.high_freq_factor, frequency, scaled)
