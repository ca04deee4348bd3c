"""Softmax of a whole row that is in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def naive(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / sum exp(x), as in the textbook: logits above 88 overflow in fp32, and a row of logits below -104 is lost."""
    return _shares(x.exp(), dim)


def safe(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max x) / sum exp(x - max x): the same function, which cannot overflow."""
    return _shares((x - finite_max(x, dim)).exp(), dim)


def online(x: Tensor, block: int = 128) -> Tensor:
    """``safe`` over the last dim in one pass over blocks: the sum is rescaled whenever the maximum grows.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3.
    """
    top, total, seen = x.new_full(x.shape[:-1], -torch.inf), x.new_zeros(x.shape[:-1]), []
    for part in x.split(block, -1):
        new = torch.maximum(top, part.amax(-1))
        level = new.masked_fill(new == -torch.inf, 0)
        exps = (part - level[..., None]).exp()
        total = total * (top - level).exp() + exps.sum(-1)
        seen.append((exps, level))
        top = new
    level, total = top.masked_fill(top == -torch.inf, 0), total.masked_fill(total == 0, 1)
    return torch.cat([exps * ((old - level).exp() / total)[..., None] for exps, old in seen], -1)


def with_sink(x: Tensor, sink: Tensor) -> Tensor:
    """``safe`` over the last dim of x and one more logit that takes its share and is then dropped: a row may sum to less than 1.

    sink broadcasts against x without its last dim. Source: gpt-oss (learned sinks); the same with sink 0 is "softmax off by one".
    """
    top = torch.maximum(finite_max(x, -1)[..., 0], sink)
    exps = (x - top[..., None]).exp()
    total = exps.sum(-1) + (sink - top).exp()
    return exps / total.masked_fill(total == 0, 1)[..., None]


def tempered(x: Tensor, temperature: float | Tensor, dim: int = -1) -> Tensor:
    """``safe`` of x / temperature; towards 0 it becomes the argmax, for which 0 itself stands (ties share)."""
    t = torch.as_tensor(temperature, dtype=x.dtype, device=x.device)
    hottest = (x == finite_max(x, dim)) & (x > -torch.inf)
    return torch.where(t == 0, _shares(hottest.to(x.dtype), dim), safe(x / t.masked_fill(t == 0, 1), dim))


def finite_max(x: Tensor, dim: int) -> Tensor:
    """The maximum, kept as a dim of 1, and 0 where there is none. Softmax does not depend on it, so no gradient flows."""
    top = x.detach().amax(dim, keepdim=True)
    return top.masked_fill(top == -torch.inf, 0)


def _shares(exps: Tensor, dim: int) -> Tensor:
    total = exps.sum(dim, keepdim=True)
    return exps / total.masked_fill(total == 0, 1)
