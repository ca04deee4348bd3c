"""The plain product: dequantize, then multiply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.numerics import integer
from zoo.components.ops.packed_matmul import Form, Layout, PackedMatmul, by_dense
from zoo.components.registry import part


@part(PackedMatmul, "reference", source="torch.nn.functional.linear")
@dataclass(frozen=True, kw_only=True)
class Reference(PackedMatmul):
    """Dequantize to the activation's dtype, then multiply; the canonical layout, on any device."""

    def refuses(self, form: Form, device: torch.device) -> list[str]:
        return []

    def from_canonical(self, form: Form, canonical: Mapping[str, Tensor]) -> Layout:
        return dict(canonical)

    def to_canonical(self, form: Form, layout: Layout) -> Layout:
        return dict(layout)

    def product(self, form: Form, layout: Layout, x: Tensor) -> Tensor:
        return by_dense(self.dense(form, layout, x.dtype), x)

    def dense(self, form: Form, layout: Layout, dtype: torch.dtype) -> Tensor:
        codes, scale, zero = integer.unpack(layout["packed"], form.grid.bits, form.inputs), layout["scale"], zeros(form, layout)
        if form.scattered:  # every input has a scale of its own then
            index = layout["group_index"].long()
            scale, zero = scale[:, index], zero[:, index] if isinstance(zero, Tensor) else zero
        return integer.dequantize(codes, scale, zero, dtype)


def zeros(form: Form, canonical: Mapping[str, Tensor]) -> Tensor | int:
    """Zeros of a canonical layout: [N, G] uint8, or the one number of a symmetric grid."""
    if form.grid.symmetric:
        return form.grid.middle
    return integer.unpack_rows(canonical["zero"], form.grid.bits, form.outputs)
