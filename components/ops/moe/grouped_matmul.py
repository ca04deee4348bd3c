"""Products of runs of rows, each with its expert's matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16  # bytes between rows, which the operator asks for
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reference(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows [R, in], weight [E, out, in], ends [E]: expert e has the rows from ends[e - 1] to ends[e] -> [R, out], 0 after the last."""
    starts = [0, *ends.tolist()]
    runs = [rows[a:b] @ w.T for a, b, w in zip(starts, starts[1:], weight, strict=False)]
    return torch.cat([*runs, rows.new_zeros(len(rows) - starts[-1], weight.shape[1])])


def accepts(dtype: torch.dtype, inputs: int, outputs: int) -> bool:
    """Whether ``grouped_matmul`` can run on these dtypes and sizes."""
    return dtype in DTYPES and inputs * dtype.itemsize % ALIGNMENT == 0 and outputs * dtype.itemsize % ALIGNMENT == 0


def grouped_matmul(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """As ``reference``, ends int32, without reading them on the host; rows after the last end are left undefined."""
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
