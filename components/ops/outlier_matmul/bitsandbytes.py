"""The product of the bitsandbytes library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.ops.bnb import unusable
from zoo.components.ops.outlier_matmul import OutlierMatmul
from zoo.components.registry import part


@part(OutlierMatmul, "bitsandbytes", source="bitsandbytes 0.50, int8_mixed_scaled_mm", needs=("bitsandbytes",))
@dataclass(frozen=True, kw_only=True)
class BitsAndBytes(OutlierMatmul):
    """Its own operators on the CPU and on GPUs.

    Its factor for 1 / 127^2 is larger by 2e-5, and on the CPU its sums are of float32.
    """

    rank = 1

    def refuses(self, device: torch.device) -> list[str]:
        return unusable(device)

    def product(self, x: Tensor, weight: Tensor, absmax: Tensor, threshold: float) -> Tensor:
        if not len(x):
            return x.new_empty(0, len(weight))
        half = x.to(torch.float16, copy=True)  # the operator writes into its argument for a while
        codes, largest, columns = torch.ops.bitsandbytes.int8_vectorwise_quant(half, threshold)
        return torch.ops.bitsandbytes.int8_mixed_scaled_mm(x, codes, weight, largest, absmax, columns)[0]
