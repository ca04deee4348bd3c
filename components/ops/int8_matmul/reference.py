"""The plain product, in float64, which holds every sum exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.ops.int8_matmul import Int8Matmul
from zoo.components.registry import part


@part(Int8Matmul, "reference", source="torch.matmul")
@dataclass(frozen=True, kw_only=True)
class Reference(Int8Matmul):
    """In float64, on any device."""

    def refuses(self, inputs: int, outputs: int, device: torch.device) -> list[str]:
        return []

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return (x.double() @ weight.double().t()).to(torch.int32)
