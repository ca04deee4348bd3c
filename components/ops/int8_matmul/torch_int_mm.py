"""PyTorch's product of integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.ops.int8_matmul import Int8Matmul
from zoo.components.registry import part

LEAST = 32  # rows; the GPU's operator takes more than 16
MULTIPLE = 8  # that the GPU's operator needs of both sizes of the weight


@part(Int8Matmul, "torch_int_mm", source="torch._int_mm")
@dataclass(frozen=True, kw_only=True)
class TorchIntMM(Int8Matmul):
    """By the tensor cores of NVIDIA GPUs, and on CPUs with AVX-512; on others the operator is many times slower than floats."""

    rank = 2

    def refuses(self, inputs: int, outputs: int, device: torch.device) -> list[str]:
        if device.type == "cpu":
            return [] if torch.backends.cpu.get_cpu_capability() == "AVX512" else ["needs a CPU with AVX-512"]
        facts = {
            f"runs on cpu and cuda, not on {device.type}": device.type != "cuda",
            f"needs inputs in multiples of {MULTIPLE}, not {inputs}": inputs % MULTIPLE != 0,
            f"needs outputs in multiples of {MULTIPLE}, not {outputs}": outputs % MULTIPLE != 0,
        }
        return [reason for reason, holds in facts.items() if holds]

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, max(0, LEAST - len(x))))
        return torch.ops.aten._int_mm(padded, weight.t())[: len(x)]
