"""PyTorch's CPU operator for 4-bit weights in groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from zoo.components.numerics import integer
from zoo.components.ops.packed_matmul import Form, Layout, PackedMatmul, by_dense, few, rows_bfloat16
from zoo.components.ops.packed_matmul.reference import zeros
from zoo.components.registry import part

GROUPS = (32, 64, 128, 256)  # that the operator takes
MIDDLE = 8  # that it subtracts


@part(PackedMatmul, "torch_int4", source="torch.ops.aten._weight_int4pack_mm_for_cpu")
@dataclass(frozen=True, kw_only=True)
class TorchInt4(PackedMatmul):
    """Up to 4 bits on the CPU in groups with bfloat16 scales; few rows are multiplied in bfloat16.

    The layout is the operator's own, half a byte per weight and 16 bits beside each scale. With few rows the activations and the
    result are rounded to bfloat16 (2^-9, relative), and so is the offset (8 - zero) * scale of an asymmetric group, by at most a 64th
    of a step. With many rows the product is float32 throughout. Codes of 2 and 3 bits are widened to 4.
    """

    rank = 2

    def refuses(self, form: Form, device: torch.device) -> list[str]:
        grid = form.grid
        facts = {
            f"runs on the CPU only, not on {device.type}": device.type != "cpu",
            f"holds up to 4 bits, not {grid.bits}": grid.bits > 4,
            f"needs groups of {', '.join(map(str, GROUPS))}, not {grid.group_size}": grid.group_size not in GROUPS,
            "needs groups of neighbouring inputs": form.scattered,
            f"needs bfloat16 scales, not {grid.scale_dtype}": grid.scale_dtype != torch.bfloat16,
            f"does not know the order in which this CPU packs {form.outputs} outputs": not _block() or form.outputs % _block() != 0,
        }
        return [reason for reason, holds in facts.items() if holds]

    def widens(self, form: Form) -> bool:
        return form.grid.bits < 4

    def from_canonical(self, form: Form, canonical: Mapping[str, Tensor]) -> Layout:
        codes = integer.unpack(canonical["packed"], form.grid.bits, form.inputs).int() + MIDDLE - form.grid.middle
        scale = canonical["scale"].float()
        offset = scale * form.grid.middle - scale * zeros(form, canonical)
        both = torch.stack((scale, offset), -1).to(torch.bfloat16)
        layout = {"nibbles": _pack(codes), "scale_offset": both.transpose(0, 1).contiguous()}
        return layout if form.grid.symmetric else layout | {"zero": canonical["zero"]}

    def to_canonical(self, form: Form, layout: Layout) -> Layout:
        codes = _codes(layout["nibbles"]).contiguous() + form.grid.middle - MIDDLE
        canonical = {"packed": integer.pack(codes, form.grid.bits), "scale": _scale(layout).contiguous()}
        return canonical if form.grid.symmetric else canonical | {"zero": layout["zero"]}

    def product(self, form: Form, layout: Layout, x: Tensor) -> Tensor:
        if not few(x):
            return by_dense(self.dense(form, layout, torch.float32), x)
        group = form.grid.group_size
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows_bfloat16(x), layout["nibbles"], group, layout["scale_offset"])
        return y.to(x.dtype).view(*x.shape[:-1], form.outputs)

    def dense(self, form: Form, layout: Layout, dtype: torch.dtype) -> Tensor:
        codes = _codes(layout["nibbles"]) + form.grid.middle - MIDDLE
        return integer.dequantize(codes, _scale(layout), zeros(form, layout), dtype)


def _scale(layout: Layout) -> Tensor:
    """[N, G]."""
    return layout["scale_offset"][..., 0].t()


def _pack(codes: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)


def _codes(nibbles: Tensor) -> Tensor:
    """The inverse of ``_pack``: [N, K/2] -> [N, K] uint8, stored input by input.

    The operator packs blocks of outputs: for each input, byte j of a block holds output j (low) and j + block/2 (high).
    """
    outputs, inputs, half = nibbles.shape[0], nibbles.shape[1] * 2, _block() // 2
    pairs = nibbles.view(-1, inputs, half).transpose(0, 1)
    return torch.stack((pairs & 15, pairs >> 4), 2).view(inputs, outputs).t()


@cache
def _block() -> int:
    """Outputs in a block, which depends on the CPU's vectors, found by trial; 0 where none fits."""
    codes = (torch.arange(64)[:, None] * torch.tensor([1, 5]) // torch.tensor([1, 4]) % 16).int()
    packed = _pack(codes).flatten().tolist()
    for block in (32, 64):
        pairs = ((b * block + j, k) for b in range(64 // block) for k in (0, 1) for j in range(block // 2))
        if packed == [int(codes[n, k]) | int(codes[n + block // 2, k]) << 4 for n, k in pairs]:
            return block
    return 0
