"""One vector of a row's tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Pool = Literal["first", "last", "mean", "first_mean"]


def pool(x: Tensor, valid: Tensor, how: Pool, skip: int = 0) -> Tensor:
    """x [B, T, M], valid [B, T] bool -> [B, M]; padding is left out, a row of nothing else gives 0.

    how: ``first_mean`` is the row's first valid token and the mean, end to end, [B, 2M] (DINOv2, arXiv:2304.07193, section 7.3).
    skip: valid tokens at the start of each row that are left out as well; the first of ``first_mean`` is not one of them.
    """
    if how == "first_mean":
        return torch.cat([pool(x, valid, "first"), pool(x, valid, "mean", skip)], -1)
    order = valid.cumsum(-1)  # the n-th valid token of its row
    keep = valid & (order > skip)
    if how == "mean":
        total = torch.where(keep[..., None], x, 0).sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
        return (total / keep.sum(-1, keepdim=True).clamp(min=1)).to(x.dtype)
    wanted = skip + 1 if how == "first" else order[:, -1:]
    return torch.where((keep & (order == wanted))[..., None], x, 0).sum(1)


def pooled_width(how: Pool, width: int) -> int:
    """The width of what ``pool`` makes of tokens of this width."""
    return 2 * width if how == "first_mean" else width
