"""Rounding input by input with the error fed forward: GPTQ's inner loop (Frantar et al. 2022, arXiv:2210.17323, algorithm 1).

Shapes: B inputs of a block, of which R are rounded, N outputs. Weights are transposed, [B, N].
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from zoo.components.ops.error_feedback import reference


def round_run(left: Tensor, factor: Tensor, scale: Tensor, zero: Tensor, count: int, top: int) -> Tensor:
    """Round the first ``count`` inputs in place and correct those that follow; returns the errors [R, N], each over its diagonal.

    left [B, N]: weights, of which the first R become codes 0 .. top as floats. factor [B, B]: upper triangular, of the inverse Hessian.
    scale, zero: [R, N], or [1, N] where all have the same.
    """
    if left.is_cuda and left.dtype == torch.float32 and importlib.util.find_spec("triton"):
        from zoo.components.ops.error_feedback import gpu

        return gpu.round_run(left, factor, scale, zero, count, top)
    return reference.round_run(left, factor, scale, zero, count, top)
