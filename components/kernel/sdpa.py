"""PyTorch's fused attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Kernel, Operands, Pattern, PositionModule, Projection, Step, View
from zoo.components.registry import part


@part(Kernel, "sdpa", source="torch.nn.functional.scaled_dot_product_attention (flash, cuDNN, memory-efficient or CPU kernel)")
@dataclass(frozen=True, kw_only=True)
class SDPA(Kernel):
    """PyTorch's fused attention; masks are left out wherever the host knows that they say nothing."""

    softmax = True

    def build(self, projection: Projection) -> nn.Module:
        return SDPAKernel()


class SDPAKernel(nn.Module):
    def forward(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
        q, k, v = a.q.transpose(1, 2), a.k.transpose(1, 2), a.v.transpose(1, 2)
        scale = a.scale * position.logit_scale
        bias = position.bias(step.pos, view.kpos)
        fact = None if bias is not None else plain(step, view, pattern)
        if fact is not None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=fact == "causal", scale=scale, enable_gqa=k.shape[1] != q.shape[1])
            return o.transpose(1, 2)
        keep = pattern.mask(step, view)
        mask = keep if bias is None else bias.to(q.dtype).masked_fill(~keep, float("-inf"))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
        blind = step.once(f"blind {pattern.key} {view.key}", lambda: ~keep.any(-1))  # [B, 1, T]
        return o.transpose(1, 2).masked_fill(blind.transpose(1, 2)[..., None], 0.0)


def plain(step: Step, view: View, pattern: Pattern) -> str | None:
    """ "causal" or "full" where that is all the mask says and the host knows it, else None."""
    seen = view.kpos.shape[1]
    if step.start is None or not view.aligned or not pattern.whole or (pattern.window is not None and pattern.window < seen):
        return None
    if not pattern.causal:
        return "full"
    if step.pos.shape[1] == 1:
        return "full"
    return "causal" if step.start == 0 else None
