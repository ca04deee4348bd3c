"""One program for a tile of outputs, which are independent of each other: its weights stay in registers over all inputs of a run."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

TILE = 16  # outputs of a program


@triton.jit
def _round_run(left, factor, scale, zero, error, outputs, factor_stride, scale_stride, top, count: tl.constexpr, rows: tl.constexpr,
               tile: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    row = tl.arange(0, rows)
    inside = (row[:, None] < count) & (column[None, :] < outputs)
    place = row[:, None].to(tl.int64) * outputs + column[None, :]
    weights = tl.load(left + place, mask=inside, other=0.0)
    codes = tl.zeros_like(weights)
    errors = tl.zeros_like(weights)
    for i in range(count):
        here = row[:, None] == i
        weight = tl.sum(tl.where(here, weights, 0.0), axis=0)
        step = tl.load(scale + i * scale_stride + column, mask=column < outputs, other=1.0)
        middle = tl.load(zero + i * scale_stride + column, mask=column < outputs, other=0.0)
        code = libdevice.rint(tl.div_rn(weight, step)) + middle
        code = tl.minimum(tl.maximum(code, 0.0), top)
        diagonal = tl.load(factor + i * factor_stride + i)
        wrong = tl.div_rn(weight - (code - middle) * step, diagonal)
        ahead = tl.load(factor + i * factor_stride + row, mask=(row > i) & (row < count), other=0.0)
        weights -= ahead[:, None] * wrong[None, :]
        codes = tl.where(here, code[None, :], codes)
        errors = tl.where(here, wrong[None, :], errors)
    tl.store(left + place, codes, mask=inside)
    tl.store(error + place, errors, mask=inside)


def round_run(left: Tensor, factor: Tensor, scale: Tensor, zero: Tensor, count: int, top: int) -> Tensor:
    outputs = left.shape[1]
    assert left.is_contiguous()
    assert factor.stride(1) == 1
    scale, zero = scale.contiguous(), zero.to(scale.dtype).contiguous()
    error = torch.empty_like(left[:count])
    stride = outputs if len(scale) > 1 else 0
    with torch.cuda.device(left.device):
        grid, sizes = (triton.cdiv(outputs, TILE),), (count, triton.next_power_of_2(count), TILE)
        launch: Any = _round_run[grid]  # whose stub wants objects of the compiler where it takes numbers
        launch(left, factor, scale, zero, error, outputs, factor.stride(0), stride, float(top), *sizes)
    left[count:].addmm_(factor[:count, count:].t(), error, alpha=-1)
    return error
