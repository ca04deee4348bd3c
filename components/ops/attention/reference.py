"""Attention as it is written in the paper, and the operands that all its forms take.

Shapes: B batch, G key/value heads, R query heads per key/value head, T queries, S keys, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zoo.components.ops.softmax import naive, safe, wide
from zoo.components.ops.softmax.running import product


@dataclass(frozen=True)
class Scene:
    """q [B, G, R, T, D], k [B, G, 1, S, D], v [B, G, 1, S, Dv]; logits are q k^T * scale + bias, seen where keep is True.

    keep: [B, 1, 1, T, S] bool. bias: [B, G, R, T, S] or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    keep: Tensor
    bias: Tensor | None = None

    def logits(self) -> Tensor:
        """[B, G, R, T, S] in fp32 (fp64 for fp64 operands), -inf where nothing is seen."""
        x = wide(self.q) @ wide(self.k).mT * self.scale
        return (x if self.bias is None else x + self.bias).masked_fill(~self.keep, -torch.inf)

    def rows(self, start: int, stop: int) -> Scene:
        """The same for a run of queries."""
        bias = None if self.bias is None else self.bias[..., start:stop, :]
        return replace(self, q=self.q[..., start:stop, :], keep=self.keep[..., start:stop, :], bias=bias)

    def columns(self, start: int, stop: int) -> Scene:
        """The same for a run of keys."""
        bias = None if self.bias is None else self.bias[..., start:stop]
        return replace(self, k=self.k[..., start:stop, :], v=self.v[..., start:stop, :], keep=self.keep[..., start:stop], bias=bias)

    def row_blocks(self, size: int) -> list[Scene]:
        return [self.rows(i, i + size) for i in range(0, self.q.shape[-2], size)]

    def column_blocks(self, size: int) -> list[Scene]:
        return [self.columns(i, i + size) for i in range(0, self.k.shape[-2], size)]


def attention(scene: Scene) -> Tensor:
    """softmax(logits) v -> [B, G, R, T, Dv]. Vaswani et al. 2017, arXiv:1706.03762, equation 1."""
    return product(safe(scene.logits()), scene.v)


def naive_attention(scene: Scene) -> Tensor:
    """The same with the textbook softmax, which overflows for large logits."""
    return product(naive(scene.logits()), scene.v)
