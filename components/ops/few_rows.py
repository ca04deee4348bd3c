"""The product of few rows with a large fp32 matrix on the CPU, which takes the time of reading the matrix.

MKL's matrix-vector product uses one thread and reaches half of the memory's speed. Summed in parts over the inputs, as a batch of
products, all threads read: 24 ms instead of 45 for the 538 MB of SmolLM2-135M on two cores, of which reading alone takes 20.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 4  # of the inputs, summed apart
FEW = 16  # rows up to which this is at least as fast as the plain product


def by_columns(weight: Tensor) -> bool:
    """Whether a weight [outputs, inputs] lies column by column."""
    return weight.stride() == (1, weight.shape[0]) and weight.shape[1] > 1


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, inputs] times a weight [outputs, inputs] that lies column by column -> [rows, outputs]; inputs a multiple of PARTS."""
    parts = weight.t().view(PARTS, -1, weight.shape[0])
    return torch.bmm(x.view(len(x), PARTS, -1).transpose(0, 1), parts).sum(0)
