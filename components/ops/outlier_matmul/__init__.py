"""Products of LLM.int8: integers of 8 bits, but for the inputs' outlier columns, which are multiplied as they are.

Shapes: x [M, K], weight [N, K] int8 and absmax [N] float32, which stand for weight * absmax / 127.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zoo.components.ops.choice import fastest
from zoo.components.spec import Spec


@dataclass(frozen=True, kw_only=True)
class OutlierMatmul(Spec):
    """One implementation.

    rank: the order in which ``choose`` tries them, highest first.
    """

    family: ClassVar[str] = "outlier_matmul"
    rank: ClassVar[int] = 0

    @abstractmethod
    def refuses(self, device: torch.device) -> list[str]:
        """Reasons why it cannot multiply on this device; empty means that it can."""

    @abstractmethod
    def product(self, x: Tensor, weight: Tensor, absmax: Tensor, threshold: float) -> Tensor:
        """[M, K] -> [M, N] in the dtype of x. threshold: the magnitude from which an input is an outlier, 0: none is."""


def choose(wanted: OutlierMatmul | None, device: torch.device) -> OutlierMatmul:
    """``wanted``, or for None the fastest implementation that accepts. Raises ValueError with the reasons of one that refuses."""
    return fastest(OutlierMatmul, wanted, device)
