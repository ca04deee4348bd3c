"""Products of signed 8-bit integers, exact in 32 bits: codes [M, K] and [N, K] -> [M, N] int32."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zoo.components.ops.choice import fastest
from zoo.components.spec import Spec


@dataclass(frozen=True, kw_only=True)
class Int8Matmul(Spec):
    """One implementation.

    rank: the order in which ``choose`` tries them, highest first.
    """

    family: ClassVar[str] = "int8_matmul"
    rank: ClassVar[int] = 0

    @abstractmethod
    def refuses(self, inputs: int, outputs: int, device: torch.device) -> list[str]:
        """Reasons why it cannot multiply with a weight [outputs, inputs] on this device; empty means that it can."""

    @abstractmethod
    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [M, K] int8, weight [N, K] int8 -> [M, N] int32, exact for K up to 131,000."""


def choose(wanted: Int8Matmul | None, inputs: int, outputs: int, device: torch.device) -> Int8Matmul:
    """``wanted``, or for None the fastest implementation that accepts. Raises ValueError with the reasons of one that refuses."""
    return fastest(Int8Matmul, wanted, inputs, outputs, device)
