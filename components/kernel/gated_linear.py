"""Gated linear attention: the state forgets by token and key channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._state import StateKernel, StateModule
from zoo.components.ops.linear_attention import chunked
from zoo.components.registry import part


@part(Kernel, "gated_linear", source="Yang et al. 2023, arXiv:2312.06635, section 4")
@dataclass(frozen=True, kw_only=True)
class GatedLinear(StateKernel):
    """S_t = diag(exp(decay_t)) S_{t-1} + k_t v_t^T, with the decay made by the projection from each token."""

    needs = frozenset({"channel_decay"})

    def build(self, projection: Projection) -> nn.Module:
        return GatedLinearKernel(self)


class GatedLinearKernel(StateModule):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, extra: Mapping[str, Tensor], valid: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return chunked(q, k, v, extra["channel_decay"], state)
