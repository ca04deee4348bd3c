"""Chunks of tokens at once: matrix products inside a chunk, one decayed sum over the chunks for what came before.

Every exponent is a sum of decays over a stretch of tokens and so never positive: nothing can overflow however strong the decay is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens, a power of two


def chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """The same as ``reference.recurrent``, in parallel (Yang et al. 2023, arXiv:2312.06635, section 3.2). chunk: a power of two."""
    size = min(chunk, 1 << (q.shape[1] - 1).bit_length())
    q_c, k_c, v_c, decay_c = (split(x, size) for x in (q, k, v, decay))
    total = decay_c.cumsum(-2)  # from the start of the chunk, the token's own decay included
    whole = total[..., -1:, :]
    added = (k_c * (whole - total).exp()).mT @ v_c
    before, state = scan(added, whole.exp().mT, state)
    return join(inside(q_c, k_c, v_c, total) + (q_c * total.exp()) @ before, q.shape[1]), state


def inside(q: Tensor, k: Tensor, v: Tensor, total: Tensor) -> Tensor:
    """What the tokens of a chunk find in each other, [..., C, V]; total [..., C, 1 or K].

    Runs of twice the length each round: the later half looks at the earlier one, both decayed to the border between them. That
    takes log2(C) pairs of products and never the C * C * K factors between all pairs of tokens.
    """
    o, half = (q * k).sum(-1, keepdim=True) * v, 1
    while half < q.shape[-2]:
        (_, q_late), (k_early, _), (v_early, _), (early, late) = (x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (q, k, v, total))
        border = early[..., -1:, :]
        found = (q_late * (late - border).exp()) @ (k_early * (border - early).exp()).mT @ v_early
        o = o + torch.stack([torch.zeros_like(found), found], -3).flatten(-4, -2)
        half *= 2
    return o


def scan(added: Tensor, factor: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """added [B, H, N, K, V], factor [B, H, N, K or 1, 1] -> the state before each chunk [B, H, N, K, V], the state after the last."""
    before = []
    for n in range(added.shape[2]):
        before.append(state)
        state = factor[:, :, n] * state + added[:, :, n]
    return torch.stack(before, 2), state


def split(x: Tensor, size: int) -> Tensor:
    """[B, T, H, D] -> [B, H, N, size, D], filled up with zeros: they add nothing and do not decay."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.transpose(1, 2).unflatten(2, (-1, size))


def join(x: Tensor, length: int) -> Tensor:
    """[B, H, N, C, D] -> [B, length, H, D]."""
    return x.flatten(2, 3)[:, :, :length].transpose(1, 2)
