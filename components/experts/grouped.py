"""Dropless experts: tokens sorted by expert, one product over all experts where their weights allow it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import MLP, Experts, ExpertsModule, Routing
from zoo.components.experts._stack import Stack
from zoo.components.ops.moe.sorting import by_expert, combine, in_runs, weighted
from zoo.components.registry import part


@part(Experts, "grouped", source="Gale et al. 2022 (MegaBlocks), arXiv:2211.15841, section 4")
@dataclass(frozen=True, kw_only=True)
class Grouped(Experts):
    """Tokens sorted by expert, none dropped; one grouped product a projection, or each expert on its run of tokens.

    The grouped product takes dense weights of experts of one formula where it is not the slower way; see ``_stack``.
    """

    exact = True

    def build(self, experts: tuple[MLP, ...], width: int) -> ExpertsModule:
        return GroupedModule(experts, width)


class GroupedModule(ExpertsModule):
    def __init__(self, experts: tuple[MLP, ...], width: int):
        super().__init__()
        self.stack = Stack.fitting(experts, width)

    def prepare(self, experts: nn.ModuleList) -> None:
        if self.stack:
            self.stack.arrange(experts)

    def forward(self, x: Tensor, routing: Routing, experts: nn.ModuleList) -> Tensor:
        s = by_expert(routing)
        stack, tensors = self.stack, self.stack.tensors(x, experts) if self.stack else {}

        def run(rows: Tensor) -> Tensor:
            return stack.run(rows, tensors, s) if stack and tensors else in_runs(rows, s.counts, experts)

        done = weighted(run, x[s.token], s.weight, routing.on_input)
        return combine(done, s.order, routing.experts.shape[1]).to(x.dtype)
