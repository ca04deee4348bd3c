"""The projection of gated DeltaNet, as Qwen3-Next has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Linear, Operands, PositionModule, Projection, ProjectionModule, Step, View
from zoo.components.projection._delta import DeltaBase, DeltaModule
from zoo.components.registry import part
from zoo.components.spec import Child, TensorInfo, default


@part(
    Projection,
    "gated_delta",
    source="Yang et al. 2024, arXiv:2412.06464, section 3.4; Qwen3NextGatedDeltaNet in Hugging Face transformers",
    example={"heads": 4, "key_heads": 2, "key_dim": 8, "value_dim": 6, "conv": 3},
)
@dataclass(frozen=True, kw_only=True)
class GatedDelta(DeltaBase):
    """Adds to ``delta`` a decay per token and head, -exp(a_log) softplus(x W + dt_bias), and an output gate norm(o) * silu(z).

    heads: of values, states and outputs. key_heads: of queries and keys, each serving heads / key_heads value heads. Other fields:
    see DeltaBase.
    """

    key_heads: int
    decay: Linear = default(Linear, "dense")
    z: Linear = default(Linear, "dense")
    provides = frozenset({"beta", "decay"})

    @property
    def query_heads(self) -> int:
        return self.key_heads

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        yield from super().problems(width)
        if self.key_heads < 1 or self.heads % self.key_heads:
            yield "key_heads", f"heads ({self.heads}) must be a multiple of key_heads ({self.key_heads})"

    def children(self, width: int) -> dict[str, Child]:
        return super().children(width) | {
            "decay": Child(self.decay, (width, self.heads, False)),
            "z": Child(self.z, (width, self.heads * self.value_dim, False)),
        }

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return super().own_tensors(width) | {"a_log": TensorInfo((self.heads,)), "dt_bias": TensorInfo((self.heads,))}

    def build(self, width: int) -> ProjectionModule:
        return GatedDeltaProjection(self, width)


class GatedDeltaProjection(DeltaModule):
    decay: nn.Module
    z: nn.Module

    def __init__(self, spec: GatedDelta, width: int):
        super().__init__(spec, width)
        self.a_log = nn.Parameter(torch.empty(spec.heads).uniform_(0.01, 16.0).log())
        self.dt_bias = nn.Parameter(torch.ones(spec.heads))

    def write(self, x: Tensor, step: Step, position: PositionModule) -> tuple[Tensor, dict[str, Tensor]]:
        q, new = super().write(x, step, position)
        wide = torch.promote_types(x.dtype, torch.float32)  # exp(a_log) reaches 16 and multiplies every step of a long decay
        decay = -self.a_log.to(wide).exp() * F.softplus(self.decay(x).to(wide) + self.dt_bias)
        z = self.z(x).unflatten(-1, (self.spec.heads, self.spec.value_dim))
        return q, new | {"decay": decay[..., None], "z": z}

    def operands(self, q: Tensor, view: View, step: Step, position: PositionModule) -> Operands:
        a, z = super().operands(q, view, step, position), view.streams["z"]
        wide = torch.promote_types(z.dtype, torch.float32)
        gated = lambda o: (self.out_norm(o) * F.silu(z.to(wide))).to(o.dtype)  # noqa: E731
        return replace(a, extra=a.extra | {"decay": view.streams["decay"]}, finish=gated)
