"""Every expert has room for the same number of tokens: what is over is dropped, what is missing is padded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from zoo.components.contracts import MLP, Experts, ExpertsModule, Routing
from zoo.components.ops.moe.balance import load
from zoo.components.ops.moe.sorting import slots, weighted
from zoo.components.registry import part


@part(Experts, "capacity", source="Lepikhin et al. 2020 (GShard), arXiv:2006.16668, 3.2; Fedus et al. 2021, arXiv:2101.03961, 2.2")
@dataclass(frozen=True, kw_only=True)
class Capacity(Experts):
    """Each expert runs exactly ceil(tokens * choices * factor / experts) tokens of the batch: more are dropped, fewer are padded.

    factor: room over an even load; None is as much as the busiest expert needs, so that nothing is dropped. Padding takes no room.
    priority: who stays, ``order``: all first choices before all second ones, each in the order of the tokens (GShard), or ``weight``:
    the highest weights (Riquelme et al. 2021, arXiv:2106.05974, section 4.1). A dropped choice adds nothing.
    """

    factor: float | None = 1.25
    priority: Literal["order", "weight"] = "order"

    @property
    def exact(self) -> bool:
        return self.factor is None

    def problems(self, experts: tuple[MLP, ...], width: int) -> Iterator[tuple[str, str]]:
        if self.factor is not None and self.factor <= 0:
            yield "factor", f"must be positive, got {self.factor}; null drops nothing"

    def rows(self, tokens: float, choices: float, experts: int) -> float:
        """With room for whatever comes, as much as an even load needs."""
        return tokens * choices if self.factor is None else experts * places(tokens * choices * self.factor / experts)

    def build(self, experts: tuple[MLP, ...], width: int) -> ExpertsModule:
        return CapacityModule(self)


class CapacityModule(ExpertsModule):
    def __init__(self, spec: Capacity):
        super().__init__()
        self.spec = spec

    def forward(self, x: Tensor, routing: Routing, experts: nn.ModuleList) -> Tensor:
        choices, width = routing.experts.shape[1], x.shape[-1]
        room = self.room(routing)
        slot = slots(routing.experts.flatten(), self.order(routing), routing.count, room)
        rows = torch.cat([x, x.new_zeros(1, width)])[slot // choices]
        weight = torch.cat([routing.weights.flatten(), routing.weights.new_zeros(1)])[slot, None]
        runs = zip(experts, rows.split(room), weight.split(room), strict=True)
        done = torch.cat([weighted(expert, r, w, routing.on_input) for expert, r, w in runs])
        back = done.new_zeros(routing.experts.numel() + 1, width).index_copy(0, slot, done)  # the last one takes what is padding
        return back[:-1].unflatten(0, (-1, choices)).sum(1).to(x.dtype)

    def room(self, routing: Routing) -> int:
        """Tokens that an expert takes."""
        if self.spec.factor is None:
            return max(1, int(load(routing).max()))
        tokens = len(routing.experts) if routing.valid is None else int(routing.valid.sum())
        return places(tokens * routing.experts.shape[1] * self.spec.factor / routing.count)

    def order(self, routing: Routing) -> Tensor:
        """[N K] the choices by priority."""
        if self.spec.priority == "weight":
            return routing.weights.detach().flatten().argsort(descending=True, stable=True)
        return torch.arange(routing.experts.numel(), device=routing.experts.device).view(routing.experts.shape).T.flatten()


def places(room: float) -> int:
    """The whole places of an expert; 110 * 1.1 / 11 is 11, which floating point puts above it."""
    return max(1, math.ceil(round(room, 6)))
