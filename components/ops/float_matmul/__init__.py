"""Products with weights that are few-bit floats, and with inputs that are rounded to such.

The tensors are those of ``linear packed_float``: ``packed`` [N, K * bits / 8] uint8 (see ``numerics/floats.py``), ``scale`` [R, C], and
``divisor`` or ``multiplier`` [1] where a scale for the whole tensor is kept; for inputs with a fixed scale ``input_divisor`` or
``input_multiplier`` [1]. N outputs, K inputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zoo.components.numerics.scaled import Grid
from zoo.components.ops.choice import fastest
from zoo.components.spec import Spec

Held = Mapping[str, Tensor]


@dataclass(frozen=True)
class Form:
    """A weight [outputs, inputs] as an implementation must know it. input_grid: what inputs are rounded to, None where they are not."""

    grid: Grid
    input_grid: Grid | None
    inputs: int
    outputs: int


@dataclass(frozen=True, kw_only=True)
class FloatMatmul(Spec):
    """One implementation.

    rank: the order in which ``choose`` tries them, highest first.
    """

    family: ClassVar[str] = "float_matmul"
    rank: ClassVar[int] = 0

    @abstractmethod
    def refuses(self, form: Form, device: torch.device) -> list[str]:
        """Reasons why it cannot multiply this weight on this device; empty means that it can."""

    @abstractmethod
    def product(self, form: Form, held: Held, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x; differentiable in x where inputs are not rounded."""


def choose(wanted: FloatMatmul | None, form: Form, device: torch.device) -> FloatMatmul:
    """``wanted``, or for None the fastest implementation that accepts. Raises ValueError with the reasons of one that refuses."""
    return fastest(FloatMatmul, wanted, form, device)


def tensor_scale(held: Held, prefix: str = "") -> Tensor | None:
    """The scale of the whole weight, or (prefix ``input_``) of all inputs, None where there is none."""
    return next((held[name] for name in (f"{prefix}divisor", f"{prefix}multiplier") if name in held), None)
