"""Embeddings of whole rows by attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import MLP, Call, Embed, Head, HeadModule, Linear, Norm, Step, attach
from zoo.components.registry import part
from zoo.components.spec import Child, TensorInfo, default


@part(
    Head,
    "attention_pooling",
    source="Lee et al. 2018 (Set Transformer), arXiv:1810.00825, section 3.2; Zhai et al. 2021, arXiv:2106.04560, section 3.4; SigLIP",
    example={"heads": 4, "head_dim": 8, "mlp": {"name": "plain", "hidden": 24}},
)
@dataclass(frozen=True, kw_only=True)
class AttentionPooling(Head):
    """One vector per row: y + mlp(norm y), where y is what a learned query (``probe``) sees of all tokens through attention."""

    heads: int
    head_dim: int
    mlp: MLP
    norm: Norm = default(Norm, "layer")
    bias: bool = True
    q: Linear = default(Linear, "dense")
    k: Linear = default(Linear, "dense")
    v: Linear = default(Linear, "dense")
    o: Linear = default(Linear, "dense")

    def problems(self, width: int, embed: Embed) -> Iterator[tuple[str, str]]:
        for name in ("heads", "head_dim"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"

    def own_tensors(self, width: int, embed: Embed) -> dict[str, TensorInfo]:
        return {"probe": TensorInfo((width,))}

    def children(self, width: int, embed: Embed) -> dict[str, Child]:
        inner = self.heads * self.head_dim
        inward = {name: Child(getattr(self, name), (width, inner, self.bias)) for name in "qkv"}
        outward = {"o": Child(self.o, (inner, width, self.bias))}
        return inward | outward | {"norm": Child(self.norm, (width,)), "mlp": Child(self.mlp, (width,))}

    def flops(self, call: Call, width: int, embed: Embed) -> float:
        parts = self.children(width, embed)
        whole = sum(parts[n].spec.flops(call, *parts[n].at) for n in "kv")
        once = sum(parts[n].spec.flops(call.tokens(1), *parts[n].at) for n in ("q", "o", "mlp"))
        return whole + once + 4 * self.heads * self.head_dim * call.new

    def build(self, width: int, embed: Embed) -> HeadModule:
        return AttentionPoolingModule(self, width, embed)


class AttentionPoolingModule(HeadModule):
    """[B, M] -> [B, M]. probe: [M]."""

    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module
    norm: nn.Module
    mlp: nn.Module

    def __init__(self, spec: AttentionPooling, width: int, embed: Embed):
        super().__init__()
        self.split = (spec.heads, spec.head_dim)
        self.probe = nn.Parameter(torch.randn(width) * 0.02)
        attach(self, spec.children(width, embed))

    def pool(self, x: Tensor, step: Step) -> Tensor:
        """[B, T, M] -> y [B, M]; a row of nothing but padding sees nothing."""
        q, k, v = (t.unflatten(-1, self.split).transpose(1, 2) for t in (self.q(self.probe.expand(len(x), 1, -1)), self.k(x), self.v(x)))
        seen = None if step.start is not None else step.valid[:, None, None]
        return self.o(F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2))[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))
