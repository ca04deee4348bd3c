"""The projection of lightning attention, as MiniMax has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Linear, Norm, Operands, PositionModule, Projection, ProjectionModule, Slot, Step, attach
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(
    Projection,
    "lightning",
    source="Qin et al. 2024, arXiv:2401.04658; MiniMaxLightningAttention in Hugging Face transformers",
    example={"heads": 2, "head_dim": 8},
)
@dataclass(frozen=True, kw_only=True)
class Lightning(Projection):
    """SiLU on queries, keys and values, no scale, and an output gate norm(o) * sigmoid(x W) with the norm over all heads together."""

    head_dim: int
    out_norm: Norm = default(Norm, "rms")
    q: Linear = default(Linear, "dense")
    k: Linear = default(Linear, "dense")
    v: Linear = default(Linear, "dense")
    gate: Linear = default(Linear, "dense")
    o: Linear = default(Linear, "dense")
    finishes = True

    @property
    def rotary_width(self) -> int:
        return self.head_dim

    @property
    def widths(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim

    def slots(self) -> dict[str, Slot]:
        return {}

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        for name in ("heads", "head_dim"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"

    def children(self, width: int) -> dict[str, Child]:
        inner = self.heads * self.head_dim
        linears = {name: Child(getattr(self, name), (width, inner, False)) for name in ("q", "k", "v", "gate")}
        return linears | {"out_norm": Child(self.out_norm, (inner,)), "o": Child(self.o, (inner, width, False))}

    def build(self, width: int) -> ProjectionModule:
        return LightningProjection(self, width)


class LightningProjection(ProjectionModule):
    q: nn.Module
    k: nn.Module
    v: nn.Module
    gate: nn.Module
    out_norm: nn.Module
    o: nn.Module

    def __init__(self, spec: Lightning, width: int):
        super().__init__()
        self.spec = spec
        attach(self, spec.children(width))

    def write(self, x: Tensor, step: Step, position: PositionModule) -> tuple[Tensor, dict[str, Tensor]]:
        """x [B, T, M] -> q [B, T, H, D] and k, v [B, T, H, D], gate [B, T, H * D]; none of them is kept."""
        q, k, v = (F.silu(f(x)).unflatten(-1, (self.spec.heads, -1)) for f in (self.q, self.k, self.v))
        return position.rotate(q, step), {"k": position.rotate(k, step), "v": v, "gate": self.gate(x).sigmoid()}

    def read(self, q: Tensor, streams: Mapping[str, Tensor]) -> Operands:
        gated = lambda o: (self.out_norm(o.flatten(-2)) * streams["gate"]).unflatten(-1, o.shape[-2:])  # noqa: E731
        return Operands(q, streams["k"], streams["v"], 1.0, finish=gated)

    def out(self, o: Tensor) -> Tensor:
        return self.o(o.flatten(-2))
