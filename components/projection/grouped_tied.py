"""Grouped tied attention: keys and values share one state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Linear, Operands, PositionModule, Projection, ProjectionModule, Slot, Step, attach
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(
    Projection,
    "grouped_tied",
    source="Zadouri et al. 2025, arXiv:2505.21487, section 3",
    example={"heads": 4, "kv_heads": 2, "head_dim": 8, "rope": 4},
)
@dataclass(frozen=True, kw_only=True)
class GroupedTied(Projection):
    """One state per group is the whole value and the unrotated part of the key; a single rotated key part serves all groups.

    A group keeps head_dim numbers per token instead of 2 head_dim, all groups together ``rope`` more. rope: the rotated channels
    at the end of each key (head_dim / 2 in the paper). bias: on q and kv, rope_bias: on the rotated key, out_bias: on o.
    logit_scale: multiplies q k^T; None is head_dim ** -0.5.
    """

    kv_heads: int
    head_dim: int
    rope: int
    bias: bool = False
    rope_bias: bool = False
    out_bias: bool = False
    logit_scale: float | None = None
    q: Linear = default(Linear, "dense")
    kv: Linear = default(Linear, "dense")
    r: Linear = default(Linear, "dense")
    o: Linear = default(Linear, "dense")

    @property
    def groups(self) -> int:
        return self.kv_heads

    @property
    def rotary_width(self) -> int:
        return self.rope

    @property
    def widths(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim

    def slots(self) -> dict[str, Slot]:
        return {"kv": Slot("token", (self.kv_heads, self.head_dim)), "r": Slot("token", (1, self.rope))}

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        for name in ("heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            yield "kv_heads", f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
        if not 1 <= self.rope <= self.head_dim:
            yield "rope", f"must lie in 1..{self.head_dim} (head_dim), got {self.rope}"

    def children(self, width: int) -> dict[str, Child]:
        return {
            "q": Child(self.q, (width, self.heads * self.head_dim, self.bias)),
            "kv": Child(self.kv, (width, self.kv_heads * self.head_dim, self.bias)),
            "r": Child(self.r, (width, self.rope, self.rope_bias)),
            "o": Child(self.o, (self.heads * self.head_dim, width, self.out_bias)),
        }

    def build(self, width: int) -> ProjectionModule:
        return GroupedTiedProjection(self, width)


class GroupedTiedProjection(ProjectionModule):
    q: nn.Module
    kv: nn.Module
    r: nn.Module
    o: nn.Module

    def __init__(self, spec: GroupedTied, width: int):
        super().__init__()
        self.spec = spec
        self.scale = spec.head_dim**-0.5 if spec.logit_scale is None else spec.logit_scale
        attach(self, spec.children(width))

    def write(self, x: Tensor, step: Step, position: PositionModule) -> tuple[Tensor, dict[str, Tensor]]:
        """x [B, T, M] -> q [B, T, H, D] and the slots kv [B, T, G, D], r [B, T, 1, rope]."""
        s = self.spec
        nope, rope = self.q(x).unflatten(-1, (s.heads, s.head_dim)).split([s.head_dim - s.rope, s.rope], -1)
        kv = self.kv(x).unflatten(-1, (s.kv_heads, s.head_dim))
        return torch.cat([nope, position.rotate(rope, step)], -1), {"kv": kv, "r": position.rotate(self.r(x)[:, :, None], step)}

    def read(self, q: Tensor, streams: Mapping[str, Tensor]) -> Operands:
        s, kv = self.spec, streams["kv"]
        k = torch.cat([kv[..., : s.head_dim - s.rope], streams["r"].expand(-1, -1, s.kv_heads, -1)], -1)
        return Operands(q, k, kv, self.scale)

    def out(self, o: Tensor) -> Tensor:
        return self.o(o.flatten(-2))
