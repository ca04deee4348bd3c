"""The product of the bitsandbytes library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.ops.block_matmul import BlockMatmul, Form, Held
from zoo.components.ops.block_matmul.reference import scales
from zoo.components.ops.bnb import unusable
from zoo.components.registry import part

KINDS = (torch.float32, torch.bfloat16, torch.float16)  # others its CPU operator takes, and reads the memory as one of these
COMPILED = 2048  # block size from which it has no routine of its own on some CPUs, and waits for torch's compiler


@part(BlockMatmul, "bitsandbytes", source="bitsandbytes 0.50, gemm_4bit and dequantize_4bit", needs=("bitsandbytes",))
@dataclass(frozen=True, kw_only=True)
class BitsAndBytes(BlockMatmul):
    """On GPUs its fused kernel, on the CPU its dequantization before torch's product; the same numbers in another order of sums."""

    rank = 1

    def refuses(self, form: Form, device: torch.device, dtype: torch.dtype) -> list[str]:
        facts = {
            f"compiles its product for blocks of {form.block_size} on the CPU": device.type == "cpu" and form.block_size >= COMPILED,
            f"multiplies float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}": dtype not in KINDS,
        }
        return [*unusable(device), *(why for why, holds in facts.items() if holds)]

    def product(self, form: Form, held: Held, x: Tensor) -> Tensor:
        if x.device.type == "cpu" or (x.requires_grad and torch.is_grad_enabled()) or not x.numel():
            return F.linear(x, self._dense(form, held, x.dtype))
        shape, packed = [form.outputs, form.inputs], held["packed"].view(-1, 1)
        return torch.ops.bitsandbytes.gemm_4bit(x.contiguous(), packed, shape, scales(held), form.block_size, form.codebook)

    def _dense(self, form: Form, held: Held, dtype: torch.dtype) -> Tensor:
        shape, packed = [form.outputs, form.inputs], held["packed"].view(-1, 1)
        absmax = scales(held)
        weight = torch.ops.bitsandbytes.dequantize_4bit(packed, absmax, form.block_size, form.codebook, shape, dtype)
        return weight.view(form.outputs, form.inputs)
