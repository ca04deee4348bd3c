"""Ring attention whose memory does not grow with the number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.components.ops.attention import Scene
from zoo.components.ops.ring.exchange import Ring
from zoo.components.ops.ring.reference import SceneOf
from zoo.components.ops.softmax import Partial, merge
from zoo.components.ops.softmax.running import wide


def ring_flash(q: Tensor, k: Tensor, v: Tensor, ring: Ring, scene_of: SceneOf, attend: Callable[[Scene], Partial]) -> Tensor:
    """The same as ``reference.ring`` for scenes without bias; only q, k, v, o and the log-sum-exp are kept for the backward pass.

    The backward pass makes the weights anew from the log-sum-exp (Dao 2023, arXiv:2307.08691, algorithm 2), block by block as keys,
    values and their gradients go round; after the last shift each gradient is home.
    """
    return RingFlash.apply(q, k, v, ring, scene_of, attend)  # pyright: ignore[reportReturnType]


class RingFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, scene_of: SceneOf, attend: Callable[[Scene], Partial]) -> Tensor:
        ctx.ring, ctx.scene_of, done, block = ring, scene_of, None, [k, v]
        for hop in range(ring.size):
            block = block if hop == 0 else ring.shift(block)
            part = attend(scene_of(q, block[0], block[1], ring.source(hop)))
            done = part if done is None else merge([done, part])
        assert done is not None
        ctx.save_for_backward(q, k, v, *done)
        return done.o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, o, lse = ctx.saved_tensors
        ring, grad = ctx.ring, wide(grad)
        dot = (grad * o).sum(-1, keepdim=True)
        dq, dk, dv = (torch.zeros_like(wide(x)) for x in (q, k, v))
        for hop in range(ring.size):
            found = block_gradients(ctx.scene_of(q, k, v, ring.source(hop)), lse, dot, grad)
            dq, dk, dv = dq + found[0], dk + found[1], dv + found[2]
            k, v = ring.shift([k, v]) if hop + 1 < ring.size else (k, v)
            dk, dv = ring.shift([dk, dv])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def block_gradients(scene: Scene, lse: Tensor, dot: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v for one block of keys; dot [..., T, 1] is grad * o summed over the channels."""
    level = lse.masked_fill(lse == -torch.inf, 0)[..., None]
    weights = (scene.logits() - level).exp()
    inner = weights * (grad @ wide(scene.v).mT - dot) * scene.scale
    dk, dv = inner.mT @ wide(scene.q), weights.mT @ grad
    return inner @ wide(scene.k), dk.sum(2, keepdim=True), dv.sum(2, keepdim=True)
