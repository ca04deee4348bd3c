"""One expert after another: the formula."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import MLP, Experts, ExpertsModule, Routing
from zoo.components.ops.moe.sorting import weighted
from zoo.components.registry import part


@part(Experts, "loop", source="Shazeer et al. 2017, arXiv:1701.06538, equation 1")
@dataclass(frozen=True, kw_only=True)
class Loop(Experts):
    """Sum of weight * expert(x), one expert after another: the reference."""

    exact = True

    def build(self, experts: tuple[MLP, ...], width: int) -> ExpertsModule:
        return LoopModule()


class LoopModule(ExpertsModule):
    def forward(self, x: Tensor, routing: Routing, experts: nn.ModuleList) -> Tensor:
        out = torch.zeros(x.shape, dtype=routing.weights.dtype, device=x.device)
        for number, expert in enumerate(experts):
            token, choice = torch.where(routing.experts == number)
            if token.numel():
                out = out.index_add(0, token, weighted(expert, x[token], routing.weights[token, choice, None], routing.on_input))
        return out.to(x.dtype)
