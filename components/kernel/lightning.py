"""Lightning attention: linear attention with a fixed decay per head and no denominator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._state import StateKernel, StateModule
from zoo.components.ops.linear_attention import chunked
from zoo.components.registry import part


@part(Kernel, "lightning", source="Qin et al. 2024, arXiv:2401.04658; slopes: MiniMax 2025, arXiv:2501.08313, section 2.2")
@dataclass(frozen=True, kw_only=True)
class Lightning(StateKernel):
    """Head h of H forgets by exp(-strength * 2^(-8 (h + 1) / H)) per token.

    depth: number of layers over which the strength falls, by 1 - layer / (depth - 1 + 1e-5) + 1e-5 in MiniMax, so that later layers
    forget more slowly; None where all have the same.
    """

    strength: float = 1.0
    depth: int | None = None

    def at_layer(self, index: int) -> Kernel:
        if self.depth is None:
            return self
        return replace(self, strength=self.strength * (1 - index / (self.depth - 1 + 1e-5) + 1e-5), depth=None)

    def problems(self, projection: Projection) -> Iterator[tuple[str, str]]:
        if self.strength < 0:
            yield "strength", f"a state must not grow; needs at least 0, got {self.strength}"

    def slopes(self, heads: int) -> list[float]:
        return [self.strength * 2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)]

    def build(self, projection: Projection) -> nn.Module:
        return LightningKernel(self, projection)


class LightningKernel(StateModule):
    def __init__(self, spec: Lightning, projection: Projection):
        super().__init__(spec)
        self.slopes = spec.slopes(projection.heads)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, extra: Mapping[str, Tensor], valid: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.tensor(self.slopes, dtype=v.dtype, device=v.device)[:, None]
        return chunked(q, k, v, -slope * valid, state)
