"""Linear attention: softmax's exponential is replaced by a product of feature maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Kernel, Projection, Slot
from zoo.components.kernel._state import StateKernel, StateModule
from zoo.components.ops.feature_map import FeatureMap
from zoo.components.ops.linear_attention import chunked
from zoo.components.registry import part


@part(Kernel, "linear", source="Katharopoulos et al. 2020, arXiv:2006.16236, section 3.3")
@dataclass(frozen=True, kw_only=True)
class LinearAttention(StateKernel):
    """phi(q) (sum phi(k) v^T) / (phi(q) sum phi(k) + eps): every earlier token weighs its feature product.

    feature_map: must not be negative, or the denominator can vanish. eps: as published; a scale of the logits cancels up to it.
    """

    feature_map: FeatureMap = "elu_plus_one"
    eps: float = 1e-6

    def states(self, projection: Projection) -> dict[str, Slot]:
        key, value = projection.widths
        return {"state": Slot("state", (projection.heads, key, value + 1), torch.float32)}

    def build(self, projection: Projection) -> nn.Module:
        return LinearKernel(self)


class LinearKernel(StateModule):
    """The denominator is one more value channel that is 1 for every token."""

    def __init__(self, spec: LinearAttention):
        super().__init__(spec)
        self.eps = spec.eps

    def mix(self, q: Tensor, k: Tensor, v: Tensor, extra: Mapping[str, Tensor], valid: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        ones = valid.expand(-1, -1, v.shape[2], -1).to(v.dtype)
        o, state = chunked(q, k, torch.cat([v, ones], -1), torch.zeros_like(ones), state)
        return o[..., :-1] / (o[..., -1:] + self.eps), state
