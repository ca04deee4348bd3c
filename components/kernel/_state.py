"""What the kernels share that keep one matrix per head instead of past tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.components.contracts import Ask, Call, Kernel, Operands, Pattern, PositionModule, Projection, Slot, Step, View
from zoo.components.ops.feature_map import FEATURE_MAPS, FeatureMap


@dataclass(frozen=True, kw_only=True)
class StateKernel(Kernel):
    """A kernel whose past is ``state`` [H, K, V] in fp32 (K, V the head's key and value widths), of the same size for any length.

    feature_map: what queries and keys go through first. products: of one token with the whole state, where it is updated and read.
    """

    feature_map: FeatureMap = "identity"
    history = False
    products: ClassVar[int] = 2

    def states(self, projection: Projection) -> dict[str, Slot]:
        return {"state": Slot("state", (projection.heads, *projection.widths), torch.float32)}

    def flops(self, call: Call, projection: Projection) -> float:
        """The recurrence; forms that take tokens in chunks compute more, in larger products."""
        return 2 * self.products * math.prod(self.states(projection)["state"].shape) * call.new

    def refuses(self, ask: Ask) -> list[str]:
        reasons = super().refuses(ask)
        if ask.pattern.name != "causal":
            reasons.append(f"sums over all earlier tokens; it cannot follow the pattern {ask.pattern.name}, use causal")
        if ask.bias:
            reasons.append("has no logits to which the position's bias could be added")
        return reasons


class StateModule(nn.Module):
    """Runs in at least fp32. Tokens count in the order in which they stand; padding adds nothing and does not decay."""

    def __init__(self, spec: StateKernel):
        super().__init__()
        self.feature_map = FEATURE_MAPS[spec.feature_map]

    def mix(self, q: Tensor, k: Tensor, v: Tensor, extra: Mapping[str, Tensor], valid: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """q, k [B, T, H, K], v [B, T, H, V], valid [B, T, 1, 1] -> o [B, T, H, V] and the state after the last token.

        Where a token is not valid, k, v and everything in ``extra`` are 0.
        """
        raise NotImplementedError

    def forward(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
        wide, valid, state = torch.promote_types(a.q.dtype, torch.float32), step.valid[..., None, None], view.state["state"]
        q = self.feature_map(a.q.to(wide)) * (a.scale * position.logit_scale)
        k = self.feature_map(a.k.to(wide)).masked_fill(~valid, 0.0)
        v = a.v.to(wide).masked_fill(~valid, 0.0)
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        extra = {name: x.to(wide).masked_fill(~valid, 0.0) for name, x in a.extra.items()}
        o, state = self.mix(q, k, v, extra, valid, state.to(wide))
        view.put("state", state)
        return o.masked_fill(~valid, 0.0).to(a.v.dtype)
