"""Chunks of tokens at once: the corrections inside a chunk solve one triangular system (the UT transform of the WY form)."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.components.ops.linear_attention.chunked import CHUNK, join, split


def chunked(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """The same as ``reference.recurrent``, in parallel (Yang et al. 2024, arXiv:2412.06464, section 3.3).

    The value that token i really adds is u_i - w_i S with S the state before the chunk; u and w do not depend on S, so only two
    products per chunk are left to do in order.
    """
    size = min(chunk, q.shape[1])
    q_c, k_c, v_c, beta_c, decay_c = (split(x, size) for x in (q, k, v, beta, decay))
    total = decay_c.cumsum(-2)
    between = decay_between(total[..., 0])
    keys = k_c * beta_c
    system = (keys @ k_c.mT) * between  # the solver takes the diagonal as one and does not look above it
    right = torch.cat([v_c * beta_c, keys * total.exp()], -1)
    u, w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]], -1)
    o, state = in_order(u, w, q_c * total.exp(), (q_c @ k_c.mT) * between, k_c * (total[..., -1:, :] - total).exp(), total, state)
    return join(o, q.shape[1]), state


def in_order(u: Tensor, w: Tensor, q: Tensor, scores: Tensor, k: Tensor, total: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The part that goes chunk by chunk. All [B, H, N, C, ...]; q is decayed from, k to the end of, its chunk."""
    outputs = []
    for n in range(u.shape[2]):
        added = u[:, :, n] - w[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + scores[:, :, n] @ added)
        state = total[:, :, n, -1:].exp() * state + k[:, :, n].mT @ added
    return torch.stack(outputs, 2), state


def decay_between(total: Tensor) -> Tensor:
    """Running log decays [..., C] -> [..., C, C], the factor that is left at i of what was added at j; zero where j > i."""
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
