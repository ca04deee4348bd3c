"""The plain product: dequantize, then multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.numerics import blockwise
from zoo.components.ops.block_matmul import BlockMatmul, Form, Held
from zoo.components.registry import part


@part(BlockMatmul, "reference", source="torch.nn.functional.linear")
@dataclass(frozen=True, kw_only=True)
class Reference(BlockMatmul):
    """Dequantize to the activation's dtype, then multiply; on any device."""

    def refuses(self, form: Form, device: torch.device, dtype: torch.dtype) -> list[str]:
        return []

    def product(self, form: Form, held: Held, x: Tensor) -> Tensor:
        return F.linear(x, dense(form, held, x.dtype))


def dense(form: Form, held: Held, dtype: torch.dtype) -> Tensor:
    """The weight [N, K], computed in float32 and rounded once."""
    count = form.outputs * form.inputs
    weight = blockwise.decode(held["packed"], scales(held), form.codebook, form.block_size, count)
    return weight.view(form.outputs, form.inputs).to(dtype)


def scales(held: Held) -> Tensor:
    """The scales of the blocks, [blocks] float32."""
    if "offset" not in held:
        return held["absmax"]
    return blockwise.decode_scales(held["absmax"], held["nested_absmax"], held["offset"])
