"""Each expert takes the tokens that suit it best, so every expert has the same load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Router, RouterModule, Routing
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Router, "expert_choice", source="Zhou et al. 2022, arXiv:2202.09368, section 3.1")
@dataclass(frozen=True, kw_only=True)
class ExpertChoice(Router):
    """Each expert takes the capacity * tokens / experts tokens of a row that score it highest; a token may have any number of experts.

    capacity: experts that a token has on average. The paper pools a batch; here experts choose within a row, so that rows do not
    change each other, and take at least one token. Whether a token is taken depends on later ones: not for causal models.
    """

    causal = False

    capacity: float = 2.0

    def problems(self, width: int, experts: int) -> Iterator[tuple[str, str]]:
        if not 0 < self.capacity <= experts:
            yield "capacity", f"must be positive and at most the number of experts ({experts}), got {self.capacity}"

    def choices(self, experts: int) -> float:
        return self.capacity

    def own_tensors(self, width: int, experts: int) -> dict[str, TensorInfo]:
        return {"weight": TensorInfo((experts, width), "float32")}

    def build(self, width: int, experts: int) -> RouterModule:
        return ExpertChoiceRouter(self, width, experts)


class ExpertChoiceRouter(RouterModule):
    def __init__(self, spec: ExpertChoice, width: int, experts: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(experts, width).uniform_(-(width**-0.5), width**-0.5))

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        """K is E: a choice of a token is an expert that took it."""
        rows = x.shape[:-1] if x.dim() == 3 else (1, *x.shape[:-1])
        seen = torch.ones(rows, dtype=torch.bool, device=x.device) if valid is None else valid.view(rows)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(self.weight.dtype), self.weight).view(*rows, -1)
            scores = logits.softmax(-1)
            taken = self.choose(scores.detach(), seen).flatten(0, 1)
        number = torch.arange(logits.shape[-1], device=x.device).expand(taken.shape)
        weights, experts = scores.flatten(0, 1).masked_fill(~taken, 0), number.masked_fill(~taken, -1)
        return Routing(weights, experts, logits.flatten(0, 1), None if valid is None else valid.flatten(), whole=False)

    def choose(self, scores: Tensor, seen: Tensor) -> Tensor:
        """scores [B, T, E], seen [B, T] -> [B, T, E] bool: the expert takes the token."""
        order = scores.masked_fill(~seen[..., None], -1).argsort(dim=1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=order.device)[None, :, None].expand_as(order))
        share = (seen.sum(1) * self.spec.capacity / scores.shape[-1]).long().clamp(min=1)
        return (rank < share[:, None, None]) & seen[..., None]
