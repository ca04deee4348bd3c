"""Which tokens a process holds. With runs of neighbours a causal mask leaves the first process idle; these orders share the work."""

from __future__ import annotations

import torch
from torch import Tensor


def striped(length: int, rank: int, size: int) -> Tensor:
    """Every ``size``-th token from ``rank`` on, [about length / size] int64. Brandon et al. 2023, arXiv:2311.09431, section 3."""
    return torch.arange(rank, length, size)


def zigzag(length: int, rank: int, size: int) -> Tensor:
    """The rank-th run of 2 * size runs from the front and the rank-th from the back (Llama 3, arXiv:2407.21783, section 3.3.2)."""
    runs = torch.arange(length).tensor_split(2 * size)
    return torch.cat([runs[rank], runs[2 * size - 1 - rank]])
