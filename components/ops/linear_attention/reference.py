"""Token by token, as the papers define it."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrent(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, K]; v [B, T, H, V]; decay [B, T, H, 1 or K], a logarithm <= 0; state [B, H, K, V]; all of one dtype.

    Returns o [B, T, H, V] and the state after the last token. Yang et al. 2023, arXiv:2312.06635, equation 3.
    """
    outputs = []
    for t in range(q.shape[1]):
        state = decay[:, t].exp()[..., None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outputs, 1), state
