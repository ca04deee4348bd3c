"""The product of few rows with a large fp32 matrix on the CPU, which takes the time of reading the matrix.

MKL's matrix-vector product uses one thread and reaches half of the memory's speed. Summed in parts over the inputs, as a batch of
products, all threads read: 24 ms instead of 45 for the 538 MB of SmolLM2-135M on two cores, of which reading alone takes 20.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 4  # of the inputs, summed apart
FEW = 16  # rows up to which two threads and more are at least as fast as with the plain product; one alone is not


def by_columns(weight: Tensor) -> bool:
    """Whether a weight [outputs, inputs] lies column by column."""
    return weight.stride() == (1, weight.shape[0]) and weight.shape[1] > 1


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether ``few_rows`` is the faster product of x [..., inputs] with a weight, and gives what the plain one would."""
    return (
        0 < x.numel() <= FEW * weight.shape[1]
        and by_columns(weight)
        and x.dtype == weight.dtype == torch.float32
        and weight.shape[1] % PARTS == 0
        and not torch.is_autocast_enabled("cpu")
        and (torch.compiler.is_compiling() or torch.get_num_threads() > 1)  # a compiler cannot trace the number
    )


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, inputs] times a weight [outputs, inputs] that lies column by column -> [rows, outputs]; inputs a multiple of PARTS."""
    parts = weight.t().view(PARTS, -1, weight.shape[0])
    return torch.bmm(x.view(len(x), PARTS, -1).transpose(0, 1), parts).sum(0)
