"""PyTorch's FlexAttention, with the pattern as its block mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from zoo.components.contracts import Kernel, Operands, Pattern, PositionModule, Projection, Step, Tokens, View
from zoo.components.registry import part


@part(Kernel, "flex", source="torch.nn.attention.flex_attention; Dong et al. 2024, arXiv:2412.05496")
@dataclass(frozen=True, kw_only=True)
class Flex(Kernel):
    """Any pattern as a predicate that is compiled into a fused kernel; blocks of 128 that see nothing are skipped.

    On the CPU it runs unfused and without gradients (PyTorch offers none there).
    """

    softmax = True

    trains_on = frozenset({"cuda"})

    def build(self, projection: Projection) -> nn.Module:
        return FlexKernel()


@cache
def fused() -> Any:
    """Compiled once, by the first call on a GPU; no module holds it, since it cannot be copied or pickled."""
    return torch.compile(flex_attention)


class FlexKernel(nn.Module):
    def forward(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
        q, k, v = a.q.transpose(1, 2), a.k.transpose(1, 2), a.v.transpose(1, 2)
        blocks = step.once(f"flex {pattern.key} {view.key}", lambda: block_mask(step, view, pattern))
        bias = position.bias(step.pos, view.kpos)

        def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert bias is not None
            return score + bias[b, h, i, j]

        flex = fused() if q.is_cuda else flex_attention
        o = flex(q, k, v, None if bias is None else biased, blocks, a.scale * position.logit_scale, enable_gqa=k.shape[1] != q.shape[1])
        assert isinstance(o, Tensor)
        return o.transpose(1, 2)


def block_mask(step: Step, view: View, pattern: Pattern) -> BlockMask:
    """The pattern over the columns of this call, which are positions only through ``pos`` and ``kpos``."""
    # Objects of their own: where a call's queries and keys shared one, PyTorch's compiler would compile again, and fail over saying why.
    qpos, kpos, qdoc, kdoc = step.pos, view.kpos.detach(), step.segment, None if view.ksegment is None else view.ksegment.detach()

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q = Tokens(qpos[b, i], None if qdoc is None else qdoc[b, i])
        k = Tokens(kpos[b, j], None if kdoc is None else kdoc[b, j])
        return pattern.allows(q, k) & (q.pos >= 0) & (k.pos >= 0)

    return create_block_mask(seen, qpos.shape[0], None, qpos.shape[1], kpos.shape[1], device=str(qpos.device))
