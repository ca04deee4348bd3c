"""The projection of gated linear attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Linear, Norm, Operands, PositionModule, Projection, ProjectionModule, Slot, Step, attach
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(
    Projection,
    "gated_linear",
    source="Yang et al. 2023, arXiv:2312.06635, section 4.3",
    example={"heads": 2, "key_dim": 8, "value_dim": 6, "gate_rank": 4},
)
@dataclass(frozen=True, kw_only=True)
class GatedLinear(Projection):
    """A log decay per token and key channel, logsigmoid(x W1 W2 + b) / temperature, and an output gate norm(o) * silu(x W).

    key_dim, value_dim: channels per head. gate_rank: width between W1 and W2. out_norm: of each head's output. The past is one
    state, so no token is kept.
    """

    key_dim: int
    value_dim: int
    gate_rank: int = 16
    temperature: float = 16.0
    out_norm: Norm = default(Norm, "rms")
    q: Linear = default(Linear, "dense")
    k: Linear = default(Linear, "dense")
    v: Linear = default(Linear, "dense")
    decay_down: Linear = default(Linear, "dense")
    decay_up: Linear = default(Linear, "dense")
    gate: Linear = default(Linear, "dense")
    o: Linear = default(Linear, "dense")
    provides = frozenset({"channel_decay"})

    @property
    def rotary_width(self) -> int:
        return self.key_dim

    @property
    def widths(self) -> tuple[int, int]:
        return self.key_dim, self.value_dim

    def slots(self) -> dict[str, Slot]:
        return {}

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        for name in ("heads", "key_dim", "value_dim", "gate_rank"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"
        if self.temperature <= 0:
            yield "temperature", f"must be positive, got {self.temperature}"

    def children(self, width: int) -> dict[str, Child]:
        key, value = self.heads * self.key_dim, self.heads * self.value_dim
        return {
            "q": Child(self.q, (width, key, False)),
            "k": Child(self.k, (width, key, False)),
            "v": Child(self.v, (width, value, False)),
            "decay_down": Child(self.decay_down, (width, self.gate_rank, False)),
            "decay_up": Child(self.decay_up, (self.gate_rank, key, True)),
            "gate": Child(self.gate, (width, value, False)),
            "out_norm": Child(self.out_norm, (self.value_dim,)),
            "o": Child(self.o, (value, width, False)),
        }

    def build(self, width: int) -> ProjectionModule:
        return GatedLinearProjection(self, width)


class GatedLinearProjection(ProjectionModule):
    q: nn.Module
    k: nn.Module
    v: nn.Module
    decay_down: nn.Module
    decay_up: nn.Module
    gate: nn.Module
    out_norm: nn.Module
    o: nn.Module

    def __init__(self, spec: GatedLinear, width: int):
        super().__init__()
        self.spec = spec
        attach(self, spec.children(width))

    def write(self, x: Tensor, step: Step, position: PositionModule) -> tuple[Tensor, dict[str, Tensor]]:
        """x [B, T, M] -> q [B, T, H, K] and k, v, decay, gate [B, T, H, K or V]; none of them is kept."""
        q, k, v, gate = (f(x).unflatten(-1, (self.spec.heads, -1)) for f in (self.q, self.k, self.v, self.gate))
        logits = self.decay_up(self.decay_down(x)).unflatten(-1, (self.spec.heads, -1))
        decay = F.logsigmoid(logits.to(torch.promote_types(x.dtype, torch.float32))) / self.spec.temperature
        return position.rotate(q, step), {"k": position.rotate(k, step), "v": v, "decay": decay, "gate": gate}

    def read(self, q: Tensor, streams: Mapping[str, Tensor]) -> Operands:
        gated = lambda o: self.out_norm(o) * F.silu(streams["gate"])  # noqa: E731
        return Operands(q, streams["k"], streams["v"], self.spec.key_dim**-0.5, {"channel_decay": streams["decay"]}, gated)

    def out(self, o: Tensor) -> Tensor:
        return self.o(o.flatten(-2))
