"""The gated delta rule: a state that is corrected and also forgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._state import StateKernel, StateModule
from zoo.components.ops.delta_rule import chunked
from zoo.components.ops.feature_map import FeatureMap
from zoo.components.registry import part


@part(Kernel, "gated_delta_rule", source="Yang et al. 2024, arXiv:2412.06464, section 3")
@dataclass(frozen=True, kw_only=True)
class GatedDeltaRule(StateKernel):
    """The delta rule on a state that first decays by exp(decay_t), one decay and one rate per token and head (Qwen3-Next).

    feature_map: keys of unit length keep the state from growing while beta lies in 0..2.
    """

    feature_map: FeatureMap = "l2"
    needs = frozenset({"beta", "decay"})
    products = 3  # what the state says of the key comes first

    def build(self, projection: Projection) -> nn.Module:
        return GatedDeltaRuleKernel(self)


class GatedDeltaRuleKernel(StateModule):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, extra: Mapping[str, Tensor], valid: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return chunked(q, k, v, extra["beta"], extra["decay"], state)
