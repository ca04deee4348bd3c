"""The delta rule: a token corrects what the state says of its key instead of adding to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._state import StateKernel, StateModule
from zoo.components.ops.delta_rule import chunked
from zoo.components.ops.feature_map import FeatureMap
from zoo.components.registry import part


@part(Kernel, "delta_rule", source="Yang et al. 2024, arXiv:2406.06484, section 3")
@dataclass(frozen=True, kw_only=True)
class DeltaRule(StateKernel):
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, with the rate beta made by the projection.

    feature_map: keys of unit length keep the state from growing while beta lies in 0..2.
    """

    feature_map: FeatureMap = "l2"
    needs = frozenset({"beta"})
    products = 3  # what the state says of the key comes first

    def build(self, projection: Projection) -> nn.Module:
        return DeltaRuleKernel(self)


class DeltaRuleKernel(StateModule):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, extra: Mapping[str, Tensor], valid: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return chunked(q, k, v, extra["beta"], torch.zeros_like(extra["beta"]), state)
