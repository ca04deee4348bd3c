"""What the projections of the delta rule share: a short convolution over queries, keys and values, and a learning rate per token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Call, Linear, Norm, Operands, PositionModule, Projection, ProjectionModule, Slot, Step, View, attach
from zoo.components.ops.short_convolution import short_convolution
from zoo.components.spec import Child, TensorInfo, default


@dataclass(frozen=True, kw_only=True)
class DeltaBase(Projection):
    """Fields of every delta projection.

    key_dim, value_dim: channels per head. conv: tokens that the short convolution sees, the token itself included. out_norm: of each
    head's output. The past is one state, so no token is kept.
    """

    key_dim: int
    value_dim: int
    conv: int = 4
    out_norm: Norm = default(Norm, "rms")
    q: Linear = default(Linear, "dense")
    k: Linear = default(Linear, "dense")
    v: Linear = default(Linear, "dense")
    beta: Linear = default(Linear, "dense")
    o: Linear = default(Linear, "dense")

    @property
    @abstractmethod
    def query_heads(self) -> int:
        """Heads of queries and keys; each serves an equal run of value heads."""

    @property
    def rotary_width(self) -> int:
        return self.key_dim

    @property
    def widths(self) -> tuple[int, int]:
        return self.key_dim, self.value_dim

    @property
    def mixed(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values, in the order of the convolution's filters."""
        return self.query_heads * self.key_dim, self.query_heads * self.key_dim, self.heads * self.value_dim

    def slots(self) -> dict[str, Slot]:
        return {}

    def states(self) -> dict[str, Slot]:
        return {"conv": Slot("state", (self.conv - 1, sum(self.mixed)))}

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        for name in ("heads", "key_dim", "value_dim", "conv"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"

    def children(self, width: int) -> dict[str, Child]:
        q, k, v = self.mixed
        return {
            "q": Child(self.q, (width, q, False)),
            "k": Child(self.k, (width, k, False)),
            "v": Child(self.v, (width, v, False)),
            "beta": Child(self.beta, (width, self.heads, False)),
            "out_norm": Child(self.out_norm, (self.value_dim,)),
            "o": Child(self.o, (v, width, False)),
        }

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return {"conv": TensorInfo((sum(self.mixed), self.conv))}

    def flops(self, call: Call, width: int) -> float:
        return super().flops(call, width) + 2 * sum(self.mixed) * self.conv * call.new


class DeltaModule(ProjectionModule):
    """Queries, keys and values stay as the linear maps made them until ``operands``, where the convolution's state is at hand."""

    q: nn.Module
    k: nn.Module
    v: nn.Module
    beta: nn.Module
    out_norm: nn.Module
    o: nn.Module

    def __init__(self, spec: DeltaBase, width: int):
        super().__init__()
        self.spec = spec
        self.conv = nn.Parameter(torch.empty(sum(spec.mixed), spec.conv).uniform_(-(spec.conv**-0.5), spec.conv**-0.5))
        attach(self, spec.children(width))

    def write(self, x: Tensor, step: Step, position: PositionModule) -> tuple[Tensor, dict[str, Tensor]]:
        """x [B, T, M] -> q [B, T, channels] and k, v, beta alike; none of them is kept."""
        return self.q(x), {"k": self.k(x), "v": self.v(x), "beta": self.beta(x).sigmoid()[..., None]}

    def operands(self, q: Tensor, view: View, step: Step, position: PositionModule) -> Operands:
        s = self.spec
        mixed = torch.cat([q, view.streams["k"], view.streams["v"]], -1)
        valid = None if step.start is not None else step.valid
        mixed, tail = short_convolution(mixed, self.conv, view.state["conv"].to(mixed.dtype), valid)
        view.put("conv", tail)
        q, k, v = F.silu(mixed).split(list(s.mixed), -1)
        q, k = (position.rotate(x.unflatten(-1, (s.query_heads, s.key_dim)), step) for x in (q, k))
        q, k = (x.repeat_interleave(s.heads // s.query_heads, 2) for x in (q, k))
        v = v.unflatten(-1, (s.heads, s.value_dim))
        return Operands(q, k, v, s.key_dim**-0.5, {"beta": view.streams["beta"]}, self.out_norm)

    def out(self, o: Tensor) -> Tensor:
        return self.o(o.flatten(-2))
