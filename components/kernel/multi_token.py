"""Multi-token attention: logits are convolved over neighbouring queries, keys and heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Ask, Call, Kernel, Operands, Pattern, PositionModule, Projection, Slot, Step, View
from zoo.components.kernel._softmax import heads_last, in_order, scene
from zoo.components.kernel.differential import lambda_init
from zoo.components.ops.softmax import safe, wide
from zoo.components.ops.softmax.running import product
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(
    Kernel,
    "multi_token",
    source="Golovneva et al. 2025, arXiv:2504.00927, section 3; facebookresearch/RAM projects/mta",
    example={"queries": 3, "keys": 3},
)
@dataclass(frozen=True, kw_only=True)
class MultiToken(Kernel):
    """Logits are convolved over ``queries`` past queries and ``keys`` keys around, weights mixed over ``mix`` heads, heads normed.

    Past queries are a state. keys is odd. layer: sets the norm's depth scale as in ``differential``; None is the layer's own index.
    """

    queries: int = 6
    keys: int = 11
    mix: int = 2
    layer: int | None = None
    eps: float = 1e-5
    masks = True
    whole_rows = True  # a forgotten key would make its neighbours neighbours of each other

    def at_layer(self, index: int) -> Kernel:
        return replace(self, layer=index) if self.layer is None else self

    def refuses(self, ask: Ask) -> list[str]:
        reasons = ["takes no position bias: convolved with the logits it would be another function"] if ask.bias else []
        if ask.pattern.segmented:
            reasons.append("would mix neighbouring documents of a packed row")
        return super().refuses(ask) + reasons

    def problems(self, projection: Projection) -> Iterator[tuple[str, str]]:
        if self.queries < 2:
            yield "queries", f"must be at least 2 (the query itself and one before it), got {self.queries}"
        if self.keys < 1 or self.keys % 2 == 0:
            yield "keys", f"must be odd, as many keys before as after, got {self.keys}"
        if self.mix < 1 or projection.heads % self.mix:
            yield "mix", f"must divide the {projection.heads} heads, got {self.mix}"
        if projection.finishes:
            yield "", f"multi_token norms head outputs, which projection {projection.name} makes only after the kernel"

    def states(self, projection: Projection) -> dict[str, Slot]:
        past = self.queries - 1
        return {
            "past_q": Slot("state", (past, projection.heads, projection.widths[0])),
            "past_end": Slot("state", (past,), torch.int64),  # position + 1, so that the zeros of a new row mean "none"
        }

    def own_tensors(self, projection: Projection) -> dict[str, TensorInfo]:
        return {
            "convolution": TensorInfo((projection.heads, 1, self.queries, self.keys)),
            "mixing": TensorInfo((projection.heads // self.mix, self.mix, self.mix)),
            "norm": TensorInfo((projection.widths[1],)),
        }

    def flops(self, call: Call, projection: Projection) -> float:
        """As plain attention, with the logits of past queries, the convolution of logits and the mixing of heads."""
        past = projection.widths_in(call)[0] * (self.queries - 1) * call.visible
        mixed = (self.queries * self.keys + self.mix) * call.new * call.visible
        return super().flops(call, projection) + 2 * projection.heads * (past + mixed)

    def build(self, projection: Projection) -> nn.Module:
        return MultiTokenKernel(self, projection)


class MultiTokenKernel(nn.Module):
    """convolution [H, 1, queries, keys], its last row and middle column the token itself; mixing [H / mix, mix, mix], old head to
    new; norm [Dv]. All start as the identity, so a fresh kernel is plain attention but for the norm.
    """

    def __init__(self, spec: MultiToken, projection: Projection):
        super().__init__()
        self.past, self.eps, self.depth_scale = spec.queries - 1, spec.eps, 1 - lambda_init(spec.layer or 0)
        identity = torch.zeros(projection.heads, 1, spec.queries, spec.keys)
        identity[:, :, -1, spec.keys // 2] = 1
        self.convolution = nn.Parameter(identity)
        self.mixing = nn.Parameter(torch.eye(spec.mix).repeat(projection.heads // spec.mix, 1, 1))
        self.norm = nn.Parameter(torch.ones(projection.widths[1]))

    def forward(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
        order = in_order(step.pos)
        q = torch.cat([view.state["past_q"].to(a.q.dtype), _taken(a.q, order)], 1)
        qpos = torch.cat([view.state["past_end"] - 1, step.pos.gather(1, order)], 1)
        self._hand_over(view, step, q, qpos)
        keys = in_order(view.kpos)
        columns = replace(a, q=q, k=_taken(a.k, keys), v=_taken(a.v, keys))
        o = self._attend(columns, replace(view, kpos=view.kpos.gather(1, keys)), Step(qpos), pattern, position)
        return _taken(o, order.argsort(1)).to(a.v.dtype)

    def _attend(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
        """Outputs [B, T, H, Dv] of the new queries; queries and keys stand in order, past queries first."""
        s = scene(a, view, step, pattern, position)
        x = s.logits().masked_fill(~s.keep, 0).flatten(1, 2)  # [B, H, past + T, S]
        side = self.convolution.shape[-1] // 2
        x = F.conv2d(F.pad(x, (side, side)), self.convolution.to(x.dtype), groups=x.shape[1])
        keep = s.keep[:, 0, :, self.past :]
        weights = safe(x.masked_fill(~keep, -torch.inf)).unflatten(1, self.mixing.shape[:2])
        mixed = torch.einsum("bnats,nac->bncts", weights, self.mixing.to(x.dtype)).flatten(1, 2)
        o = product(mixed.unflatten(1, (s.k.shape[1], -1)), s.v)
        return heads_last(F.rms_norm(o, self.norm.shape, self.norm.to(o.dtype), self.eps) * self.depth_scale, o)

    def _hand_over(self, view: View, step: Step, q: Tensor, qpos: Tensor) -> None:
        """The last queries of each row, padding left out."""
        last = step.valid.sum(1, keepdim=True) + torch.arange(self.past, device=q.device)
        view.put("past_q", wide(_taken(q, last)))
        view.put("past_end", qpos.gather(1, last) + 1)


def _taken(x: Tensor, at: Tensor) -> Tensor:
    """x [B, N, ...] at columns [B, M]."""
    return x.gather(1, at.reshape(*at.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))
