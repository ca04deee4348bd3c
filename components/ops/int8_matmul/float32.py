"""The product in float32, in runs of inputs short enough for exact sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.ops.int8_matmul import Int8Matmul
from zoo.components.registry import part

RUN = 1024  # inputs whose products, of magnitude 2^14 at most, sum to no more than the 2^24 that float32 counts to


@part(Int8Matmul, "float32", source="torch.matmul")
@dataclass(frozen=True, kw_only=True)
class Float32(Int8Matmul):
    """On CPUs, most of which have no fast product of integers."""

    rank = 1

    def refuses(self, inputs: int, outputs: int, device: torch.device) -> list[str]:
        return [] if device.type == "cpu" else [f"runs on the CPU only, not on {device.type}: elsewhere products may be rounded"]

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        sums = torch.zeros(len(x), len(weight), dtype=torch.int32)
        for some, columns in zip(x.split(RUN, 1), weight.split(RUN, 1), strict=True):
            sums += (some.float() @ columns.float().t()).to(torch.int32)
        return sums
