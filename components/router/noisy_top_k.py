"""Top-k of logits that are noisy while training, so that experts which are never best are still tried."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Router, RouterModule
from zoo.components.registry import part
from zoo.components.router.top_k import TopK, TopKRouter
from zoo.components.spec import TensorInfo


@part(Router, "noisy_top_k", source="Shazeer et al. 2017, arXiv:1701.06538, section 2.1")
@dataclass(frozen=True, kw_only=True)
class NoisyTopK(TopK):
    """top_k of x W + gaussian noise * softplus(x W_noise) while training; without noise otherwise. Fields: see top_k."""

    def own_tensors(self, width: int, experts: int) -> dict[str, TensorInfo]:
        return super().own_tensors(width, experts) | {"noise": TensorInfo((experts, width), "float32")}

    def build(self, width: int, experts: int) -> RouterModule:
        return NoisyTopKRouter(self, width, experts)


class NoisyTopKRouter(TopKRouter):
    def __init__(self, spec: NoisyTopK, width: int, experts: int):
        super().__init__(spec, width, experts)
        self.noise = nn.Parameter(torch.zeros(experts, width))

    def logits(self, x: Tensor) -> Tensor:
        clean = super().logits(x)
        return clean + torch.randn_like(clean) * F.softplus(F.linear(x, self.noise)) if self.training else clean
