"""PyTorch's CPU operator for 8-bit weights with one scale per output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from zoo.components.numerics import integer
from zoo.components.ops.packed_matmul import Form, Layout, PackedMatmul, by_dense, few, rows_bfloat16
from zoo.components.registry import part

LANES = 32  # the operator reads whole vectors of inputs, past the end of a row that does not fill one


@part(PackedMatmul, "torch_int8", source="torch.ops.aten._weight_int8pack_mm")
@dataclass(frozen=True, kw_only=True)
class TorchInt8(PackedMatmul):
    """Up to 8 bits on the CPU, one scale per output; few rows are multiplied in bfloat16.

    The layout is one signed byte per weight. With few rows the activations and the sums are rounded to bfloat16 (2^-9, relative);
    the scale is applied outside the operator in its own dtype. With many rows the product is float32 throughout.
    """

    rank = 1

    def refuses(self, form: Form, device: torch.device) -> list[str]:
        facts = {
            f"runs on the CPU only, not on {device.type}": device.type != "cpu",
            "needs groups of neighbouring inputs": form.scattered,
            "needs a symmetric grid": not form.grid.symmetric,
            f"needs one scale per output, not groups of {form.grid.group_size}": form.grid.groups(form.inputs) != 1,
            f"needs inputs in multiples of {LANES}, not {form.inputs}": form.inputs % LANES != 0,
        }
        return [reason for reason, holds in facts.items() if holds]

    def widens(self, form: Form) -> bool:
        return form.grid.bits < 8

    def from_canonical(self, form: Form, canonical: Mapping[str, Tensor]) -> Layout:
        codes = integer.unpack(canonical["packed"], form.grid.bits, form.inputs)
        return {"codes": (codes - form.grid.middle).view(torch.int8), "scale": canonical["scale"]}

    def to_canonical(self, form: Form, layout: Layout) -> Layout:
        codes = layout["codes"].view(torch.uint8) + form.grid.middle
        return {"packed": integer.pack(codes, form.grid.bits), "scale": layout["scale"]}

    def product(self, form: Form, layout: Layout, x: Tensor) -> Tensor:
        if not few(x):
            return by_dense(self.dense(form, layout, torch.float32), x)
        sums = torch.ops.aten._weight_int8pack_mm(rows_bfloat16(x), layout["codes"], _ones(form.outputs))
        return (sums * layout["scale"].view(-1)).to(x.dtype).view(*x.shape[:-1], form.outputs)

    def dense(self, form: Form, layout: Layout, dtype: torch.dtype) -> Tensor:
        return integer.dequantize(layout["codes"], layout["scale"], 0, dtype)


@cache
def _ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bfloat16)
