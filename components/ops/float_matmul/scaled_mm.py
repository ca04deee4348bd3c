"""PyTorch's product of FP8 matrices with scales per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from zoo.components.numerics import scaled
from zoo.components.ops.float_matmul import FloatMatmul, Form, Held, tensor_scale
from zoo.components.ops.float_matmul.reference import weight_scale
from zoo.components.registry import part

STEP = 16  # what the GPU's operator needs both sizes to be multiples of
CAPABILITY = (8, 9)  # Ada, the first with products of FP8


@part(FloatMatmul, "scaled_mm", source="torch.nn.functional.scaled_mm")
@dataclass(frozen=True, kw_only=True)
class ScaledMM(FloatMatmul):
    """E4M3 weights with a scale per output or for all, times E4M3 inputs with a scale per token or for all.

    The product of the codes is summed in float32, scaled, and on a GPU rounded to bfloat16 (2^-9, relative).
    """

    rank = 1

    def refuses(self, form: Form, device: torch.device) -> list[str]:
        facts = {
            "needs E4M3 inputs with a scale per token or for all": not _suits(form.input_grid),
            "needs E4M3 weights with a scale per output or for all": not _suits(form.grid),
            f"runs on the CPU and on CUDA devices, not on {device.type}": device.type not in ("cpu", "cuda"),
        }
        if device.type == "cuda":
            odd = form.inputs % STEP or form.outputs % STEP
            facts[f"needs sizes in multiples of {STEP}, not {form.inputs} and {form.outputs}"] = bool(odd)
            old = torch.cuda.is_available() and torch.cuda.get_device_capability(device) < CAPABILITY
            facts[f"needs a GPU of compute capability {'.'.join(map(str, CAPABILITY))}"] = old
        return [reason for reason, holds in facts.items() if holds]

    def product(self, form: Form, held: Held, x: Tensor) -> Tensor:
        assert form.input_grid is not None
        rows = x.reshape(-1, form.inputs)
        own = scaled.token_scales(rows, form.input_grid, tensor_scale(held, "input_"))
        left = scaled.codes(rows, own, form.input_grid).view(torch.float8_e4m3fn)
        right = held["packed"].view(torch.float8_e4m3fn).t()
        theirs = weight_scale(form, held).expand(form.outputs, 1).t().contiguous()
        own = own.expand(len(rows), 1).contiguous()
        wide = torch.float32 if x.device.type == "cpu" else torch.bfloat16
        y = F.scaled_mm(left, right, own, ScalingType.RowWise, theirs, ScalingType.RowWise, output_dtype=wide)
        return y.to(x.dtype).view(*x.shape[:-1], form.outputs)


def _suits(grid: scaled.Grid | None) -> bool:
    return grid is not None and grid.element.name == "e4m3" and grid.columns is None and grid.rows in (1, None)
