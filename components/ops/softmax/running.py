"""Softmax-weighted sums that are built up block by block, or from parts that were computed apart.

Shapes: ... leading dims, T queries, S keys, D value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


def wide(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if it was: the precision in which softmax is computed and products are accumulated."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product(weights: Tensor, v: Tensor) -> Tensor:
    """weights [..., T, S] @ v [..., S, D] as tensor cores do it: operands in v's dtype, sums in fp32."""
    return wide(weights.to(v.dtype)) @ wide(v)


class Partial(NamedTuple):
    """Attention over some of the keys: o [..., T, D] normalised over them, lse [..., T] the log of their exponentials' sum."""

    o: Tensor
    lse: Tensor


class Running(NamedTuple):
    """What one pass over the keys carries along: o [..., T, D] not yet divided, top [..., T] maximum, total [..., T] sum."""

    o: Tensor
    top: Tensor
    total: Tensor

    @classmethod
    def start(cls, like: Tensor, width: int) -> Running:
        """Nothing seen yet by the queries ``like`` [..., T, D]."""
        zero = wide(like.new_zeros(like.shape[:-1]))
        return cls(zero[..., None].repeat_interleave(width, -1), torch.full_like(zero, -torch.inf), zero)

    def add(self, x: Tensor, v: Tensor, weighted: Product = product) -> Running:
        """One more block of keys: logits x [..., T, S] and values v [..., S, D]."""
        top = torch.maximum(self.top, x.detach().amax(-1))
        level = top.masked_fill(top == -torch.inf, 0)
        exps, shrink = (x - level[..., None]).exp(), (self.top - level).exp()
        return Running(self.o * shrink[..., None] + weighted(exps, v), top, self.total * shrink + exps.sum(-1))

    def end(self) -> Partial:
        """One division at the end; 0 and -inf for queries that saw nothing."""
        level = self.top.masked_fill(self.top == -torch.inf, 0)
        return Partial(divided(self.o, self.total), log_sum(self.total, level))


def divided(o: Tensor, total: Tensor) -> Tensor:
    """o [..., T, D] / total [..., T], and 0 where the total is 0."""
    return o / total.masked_fill(total == 0, 1)[..., None]


def log_sum(total: Tensor, level: Tensor) -> Tensor:
    """log(total) + level, and -inf where the total is 0, with a gradient of 0 there."""
    empty = total == 0
    return (total.masked_fill(empty, 1).log() + level).masked_fill(empty, -torch.inf)


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention over the union of disjoint sets of keys. Source: Dao 2023, flash decoding; Liu et al. 2023, arXiv:2310.01889.

    A part that saw nothing has lse -inf and no weight.
    """
    lse = torch.stack([p.lse for p in parts])
    top = lse.detach().amax(0)
    level = top.masked_fill(top == -torch.inf, 0)
    weights = (lse - level).exp()
    total = weights.sum(0)
    o = (weights[..., None] * torch.stack([p.o for p in parts])).sum(0)
    return Partial(divided(o, total), log_sum(total, level))
