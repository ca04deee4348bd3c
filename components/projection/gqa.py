"""Grouped-query projection: MHA, GQA and MQA are one part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from zoo.components.contracts import Linear, Norm, Operands, PositionModule, Projection, ProjectionModule, Slot, Step, attach
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(
    Projection,
    "gqa",
    source="Ainslie et al. 2023, arXiv:2305.13245; MQA: Shazeer 2019, arXiv:1911.02150",
    example={"heads": 4, "kv_heads": 2, "head_dim": 8},
)
@dataclass(frozen=True, kw_only=True)
class GroupedQuery(Projection):
    """Queries of ``heads`` heads share ``kv_heads`` key/value heads: MHA where equal, MQA with one.

    head_dim is free, not width / heads. bias: on q, k and v; out_bias: on o. qk_norm is applied to q and k where qk_norm_at says:
    ``head`` on each head before rotation (Qwen3, Gemma3), ``flat`` on all heads together before the split (OLMo-2),
    ``rotated`` on each head after rotation (Hunyuan). clip: q, k and v are cut to -clip .. clip before rotation, where a norm
    comes first after it (MPT, OLMoE, DBRX), None for not at all. logit_scale: multiplies q k^T; None is head_dim ** -0.5.
    """

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None
    qk_norm_at: Literal["head", "flat", "rotated"] = "head"
    clip: float | None = None
    logit_scale: float | None = None
    q: Linear = default(Linear, "dense")
    k: Linear = default(Linear, "dense")
    v: Linear = default(Linear, "dense")
    o: Linear = default(Linear, "dense")

    @property
    def groups(self) -> int:
        return self.kv_heads

    @property
    def rotary_width(self) -> int:
        return self.head_dim

    @property
    def widths(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim

    def slots(self) -> dict[str, Slot]:
        return {"k": Slot("token", (self.kv_heads, self.head_dim)), "v": Slot("token", (self.kv_heads, self.head_dim))}

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        for name in ("heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            yield "kv_heads", f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
        if self.clip is not None and self.clip <= 0:
            yield "clip", f"must be positive, got {self.clip}"

    def children(self, width: int) -> dict[str, Child]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = {
            "q": Child(self.q, (width, q, self.bias)),
            "k": Child(self.k, (width, kv, self.bias)),
            "v": Child(self.v, (width, kv, self.bias)),
            "o": Child(self.o, (q, width, self.out_bias)),
        }
        if self.qk_norm is None:
            return linears
        flat = self.qk_norm_at == "flat"
        norms = {
            "q_norm": Child(self.qk_norm, (q if flat else self.head_dim,)),
            "k_norm": Child(self.qk_norm, (kv if flat else self.head_dim,)),
        }
        return linears | norms

    def build(self, width: int) -> ProjectionModule:
        return GroupedQueryProjection(self, width)


class GroupedQueryProjection(ProjectionModule):
    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module

    def __init__(self, spec: GroupedQuery, width: int):
        super().__init__()
        self.spec = spec
        self.scale = spec.head_dim**-0.5 if spec.logit_scale is None else spec.logit_scale
        attach(self, spec.children(width))
        self.normed = spec.qk_norm is not None

    def shape(self, x: Tensor, name: str, heads: int, step: Step, position: PositionModule) -> Tensor:
        """Queries or keys [B, T, heads * D] split into heads, cut, normed and rotated in the order that the spec names."""
        split = (heads, self.spec.head_dim)
        if not self.normed:
            return position.rotate(self.cut(x).unflatten(-1, split), step)
        norm = getattr(self, name)
        if self.spec.qk_norm_at == "rotated":
            return norm(position.rotate(self.cut(x).unflatten(-1, split), step))
        x = norm(x).unflatten(-1, split) if self.spec.qk_norm_at == "flat" else norm(x.unflatten(-1, split))
        return position.rotate(self.cut(x), step)

    def write(self, x: Tensor, step: Step, position: PositionModule) -> tuple[Tensor, dict[str, Tensor]]:
        """x [B, T, M] -> q [B, T, H, D] and the slots k, v [B, T, G, D]."""
        k = self.shape(self.k(x), "k_norm", self.spec.kv_heads, step, position)
        v = self.cut(self.v(x)).unflatten(-1, (self.spec.kv_heads, self.spec.head_dim))
        return self.shape(self.q(x), "q_norm", self.spec.heads, step, position), {"k": k, "v": v}

    def cut(self, x: Tensor) -> Tensor:
        return x if self.spec.clip is None else x.clamp(-self.spec.clip, self.spec.clip)

    def read(self, q: Tensor, streams: Mapping[str, Tensor]) -> Operands:
        return Operands(q, streams["k"], streams["v"], self.scale)

    def out(self, o: Tensor) -> Tensor:
        return self.o(o.flatten(-2))
