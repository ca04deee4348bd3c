"""Mixture of experts: a router chooses, for each token, which of many feed-forward parts run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import MLP, Call, Chained, Experts, ExpertsModule, Prepared, Router, RouterModule, attach
from zoo.components.registry import part
from zoo.components.spec import Child, TensorInfo, default


@part(
    MLP,
    "moe",
    source="Shazeer et al. 2017, arXiv:1701.06538; shared and fine-grained experts: Dai et al. 2024 (DeepSeekMoE), arXiv:2401.06066",
    example={"router": "top_k", "experts": [{"repeat": 4, "name": "gated", "hidden": 8}]},
)
@dataclass(frozen=True, kw_only=True)
class MoE(MLP):
    """Weighted sum of the experts that a router chooses for each token, plus a shared expert that every token passes.

    experts: any feed-forward parts, each with storages of its own; many narrow ones are fine-grained (segmented) experts. shared:
    several shared experts are one of their widths' sum. shared_gate: sigmoid of a product with the input weighs the shared expert
    (Qwen2-MoE). dispatch: how the chosen experts are run.
    """

    sees_padding = True

    router: Router
    experts: tuple[MLP, ...]
    shared: MLP | None = None
    shared_gate: bool = False
    dispatch: Experts = default(Experts, "grouped")

    @property
    def causal(self) -> bool:
        return self.router.causal and all(e.causal for e in (*self.experts, self.shared) if e)

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        if not self.experts:
            yield "experts", "a mixture has at least one expert"
        for i, expert in enumerate(self.experts):
            if expert.sees_padding:
                yield f"experts.{i}", f"{expert.name} looks at padding, which an expert is not told of"
        if self.shared and self.shared.sees_padding:
            yield "shared", f"{self.shared.name} looks at padding, which a shared expert is not told of"
        if self.shared_gate and self.shared is None:
            yield "shared_gate", "there is no shared expert to gate"

    def children(self, width: int) -> dict[str, Child]:
        return {
            "router": Child(self.router, (width, len(self.experts))),
            **{f"experts.{i}": Child(expert, (width,)) for i, expert in enumerate(self.experts)},
            **({"shared": Child(self.shared, (width,))} if self.shared else {}),
            "dispatch": Child(self.dispatch, (self.experts, width)),
        }

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return {"shared_gate": TensorInfo((1, width))} if self.shared_gate else {}

    def flops(self, call: Call, width: int) -> float:
        """Experts are taken to be chosen evenly."""
        children, count = self.children(width), len(self.experts)
        rows = self.dispatch.rows(call.new, self.router.choices(count), count)
        shares = {n: call.tokens(rows / count if n.startswith("experts.") else call.new) for n in children}
        gate = 2 * width * call.new if self.shared_gate else 0
        return gate + sum(c.spec.flops(shares[n], *c.at) for n, c in children.items())

    def bytes_read(self, call: Call, element_bytes: int, width: int) -> float:
        """Of the experts, those that an even choice of independent tokens is expected to touch."""
        children, count = self.children(width), len(self.experts)
        touched = 1 - (1 - min(1.0, self.router.choices(count) / count)) ** call.new
        shares = {n: touched if n.startswith("experts.") else 1.0 for n in children}
        own = sum(t.bytes(element_bytes) for t in self.own_tensors(width).values())
        return own + sum(shares[n] * c.spec.bytes_read(call, element_bytes, *c.at) for n, c in children.items())

    def build(self, width: int) -> nn.Module:
        return MoEMLP(self, width)


class MoEMLP(Prepared, Chained):
    """x [..., M], valid [...] bool (None: nothing is padding) -> [..., M]; padding gets what the shared expert says, or 0."""

    router: RouterModule
    shared: nn.Module
    dispatch: ExpertsModule

    def __init__(self, spec: MoE, width: int):
        super().__init__()
        children = spec.children(width)
        attach(self, {n: c for n, c in children.items() if not n.startswith("experts.")})
        self.experts = nn.ModuleList(c.build() for n, c in children.items() if n.startswith("experts."))
        self.shared_gate = nn.Parameter(torch.zeros(1, width)) if spec.shared_gate else None
        self.has_shared = spec.shared is not None

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        routing = self.router(x, valid)
        y = self.dispatch(x.flatten(0, -2), routing, self.experts).view(x.shape)
        return y + self.always(x) if self.has_shared else y

    def always(self, x: Tensor) -> Tensor:
        """What the shared expert adds."""
        y = self.shared(x)
        return y if self.shared_gate is None else torch.sigmoid(nn.functional.linear(x, self.shared_gate)) * y

    def chain(self, following: Chained) -> None:
        if isinstance(following, MoEMLP):
            self.dispatch.precede(following.router, following.dispatch, following.experts)

    def prepare(self) -> None:
        self.dispatch.prepare(self.experts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoEMLP:
        super()._apply(fn, recurse)
        self.prepare()
        return self
