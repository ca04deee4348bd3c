"""Reversible changes of layout between tensors on disk and in the model. See zoo.weights.Rule.

Each function gives an Op whose ``forward`` goes from disk to model and whose ``backward`` undoes it to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from zoo.weights import Op, Tensors


def each(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Op:
    """The same change on every tensor of the entry."""
    return Op(lambda tensors: [forward(t) for t in tensors], lambda tensors: [backward(t) for t in tensors])


def transposed() -> Op:
    """[inputs, outputs] on disk (GPT-2's Conv1D), [outputs, inputs] in the model."""
    return each(Tensor.t, Tensor.t)


def viewed(theirs: Sequence[int], ours: Sequence[int]) -> Op:
    """Another shape of the same numbers; one size of each may be -1. Raises ValueError forward for a tensor of another shape."""

    def forward(tensor: Tensor) -> Tensor:
        if tensor.dim() != len(theirs) or any(want not in (-1, have) for want, have in zip(theirs, tensor.shape, strict=True)):
            raise ValueError(f"the shape is {list(tensor.shape)}, it must be {list(theirs)} (-1 is any size)")
        return tensor.reshape(tuple(ours))

    return each(forward, lambda t: t.reshape(tuple(theirs)))


def split(sizes: Sequence[int], dim: int = 0) -> Op:
    """One tensor on disk is several, end to end along ``dim``, of these sizes."""
    return Op(lambda ts: list(ts[0].split(list(sizes), dim)), lambda ts: [torch.cat(ts, dim)])


def split_evenly(count: int, dim: int = 0) -> Op:
    """One tensor on disk is ``count`` of the same size, end to end along ``dim``."""
    return Op(lambda ts: list(ts[0].chunk(count, dim)), lambda ts: [torch.cat(ts, dim)])


def joined(count: int, dim: int = 0) -> Op:
    """``count`` tensors of the same size on disk are one, end to end along ``dim`` (StableLM's norms of single heads)."""
    return Op(lambda ts: [torch.cat(ts, dim)], lambda ts: list(ts[0].chunk(count, dim)))


def split_groups(groups: int, sizes: Sequence[int], dim: int = 0) -> Op:
    """Along ``dim`` one tensor repeats ``groups`` times [a rows, b rows, ...]; ours are all a, all b, ... (GPT-NeoX, Falcon, Bloom)."""

    def forward(tensors: Tensors) -> Tensors:
        parts = tensors[0].unflatten(dim, (groups, sum(sizes))).split(list(sizes), dim + 1)
        return [p.flatten(dim, dim + 1) for p in parts]

    def backward(tensors: Tensors) -> Tensors:
        return [torch.cat([t.unflatten(dim, (groups, -1)) for t in tensors], dim + 1).flatten(dim, dim + 1)]

    return Op(forward, backward)


def interleaved(dim: int = 0) -> Op:
    """Along ``dim`` one tensor on disk holds two in turns: even places and odd places (gpt-oss's gate and up)."""
    return Op(lambda ts: list(ts[0].unflatten(dim, (-1, 2)).unbind(dim + 1)), lambda ts: [torch.stack(ts, dim + 1).flatten(dim, dim + 1)])


def unstacked() -> Op:
    """One tensor on disk has an entry of the model for each place of its first dimension (fused experts)."""
    return Op(lambda ts: list(ts[0].unbind(0)), lambda ts: [torch.stack(ts)])


def rope_rows(heads: int, width: int | None = None) -> Op:
    """Rows of a q or k projection from interleaved pairs (2i, 2i+1) on disk to halves (i, i + width/2); width: rotated rows of a head."""
    return each(lambda t: _pairs_to_halves(t, heads, width), lambda t: _halves_to_pairs(t, heads, width))


def _pairs_to_halves(t: Tensor, heads: int, width: int | None) -> Tensor:
    head = t.unflatten(0, (heads, -1))
    turned = head[:, :width].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, head[:, turned.shape[1] :]], 1).flatten(0, 1)


def _halves_to_pairs(t: Tensor, heads: int, width: int | None) -> Tensor:
    head = t.unflatten(0, (heads, -1))
    turned = head[:, :width].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, head[:, turned.shape[1] :]], 1).flatten(0, 1)


def then(*ops: Op) -> Op:
    """One change after the other, in reading order from disk to model."""
    return Op(lambda ts: reduce(lambda x, op: op.forward(x), ops, ts), lambda ts: reduce(lambda x, op: op.backward(x), reversed(ops), ts))


def across(op: Op, parts: int) -> Op:
    """``op``, which makes ``parts`` tensors of one, on each tensor of an entry: all first parts, then all second ones, ..."""

    def forward(tensors: Tensors) -> Tensors:
        rows = [op.forward([t]) for t in tensors]
        return [row[i] for i in range(parts) for row in rows]

    def backward(tensors: Tensors) -> Tensors:
        count = len(tensors) // parts
        return [op.backward(tensors[i::count])[0] for i in range(count)]

    return Op(forward, backward)
