"""Each token takes the k experts of the highest score: score, choose, weigh, with the variants of published models as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Router, RouterModule, Routing, identity
from zoo.components.registry import part
from zoo.components.spec import TensorInfo

TINY = 1e-20  # DeepSeek-V3's guard; far below half a unit in the last place of any other sum, so it changes nothing else


def renormalize(chosen: Tensor) -> Tensor:
    return chosen / (chosen.sum(-1, keepdim=True) + TINY)


SCORE: dict[str, Callable[[Tensor], Tensor]] = {"softmax": partial(torch.softmax, dim=-1), "sigmoid": torch.sigmoid, "linear": identity}
WEIGH: dict[str, Callable[[Tensor], Tensor]] = {
    "keep": identity,
    "renormalize": renormalize,
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
}


@part(Router, "top_k", source="Shazeer et al. 2017, arXiv:1701.06538; DeepSeek-AI 2024, arXiv:2405.04434, 2.2 and arXiv:2412.19437, 2.1.2")
@dataclass(frozen=True, kw_only=True)
class TopK(Router):
    """Each token goes to the k experts of the highest score.

    score: what is made of the logits before choosing. bias: on the logits. correction: a bias that takes part in choosing only and
    that training moves to balance the load. groups: experts stand in this many equal groups (devices, nodes), of which a token uses
    the ``kept_groups`` best, a group being as good as the sum of its ``group_top`` highest scores. weigh: what becomes of the chosen
    scores, which ``scale`` then multiplies. on_input: the weight multiplies the expert's input instead of its output.
    """

    k: int = 2
    score: Literal["softmax", "sigmoid", "linear"] = "softmax"
    bias: bool = False
    correction: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_top: int = 1
    weigh: Literal["keep", "renormalize", "softmax", "sigmoid"] = "renormalize"
    scale: float = 1.0
    on_input: bool = False

    def problems(self, width: int, experts: int) -> Iterator[tuple[str, str]]:
        if self.groups < 1 or experts % self.groups:
            yield "groups", f"{experts} experts do not divide into {self.groups} equal groups"
        elif not 1 <= self.kept_groups <= self.groups:
            yield "kept_groups", f"must lie in 1..{self.groups} (groups), got {self.kept_groups}"
        elif not 1 <= self.group_top <= experts // self.groups:
            yield "group_top", f"must lie in 1..{experts // self.groups} (experts in a group), got {self.group_top}"
        elif not 1 <= self.k <= experts // self.groups * self.kept_groups:
            yield "k", f"must lie in 1..{experts // self.groups * self.kept_groups} (experts that a token may choose from), got {self.k}"

    def choices(self, experts: int) -> float:
        return self.k

    def own_tensors(self, width: int, experts: int) -> dict[str, TensorInfo]:
        vector = TensorInfo((experts,), "float32")
        held = {"weight": TensorInfo((experts, width), "float32")}
        return held | ({"bias": vector} if self.bias else {}) | ({"correction": vector} if self.correction else {})

    def build(self, width: int, experts: int) -> RouterModule:
        return TopKRouter(self, width, experts)


class TopKRouter(RouterModule):
    correction: Tensor | None

    def __init__(self, spec: TopK, width: int, experts: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(experts, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(experts)) if spec.bias else None
        self.register_buffer("correction", torch.zeros(experts) if spec.correction else None)
        self.score, self.weigh = SCORE[spec.score], WEIGH[spec.weigh]

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        with torch.autocast(x.device.type, enabled=False):
            logits = self.logits(x.flatten(0, -2).to(self.weight.dtype))
            scores = self.score(logits)
            experts = self.choose(scores.detach())
            weights = self.weigh(scores.gather(-1, experts)) * self.spec.scale
        return hide_padding(Routing(weights, experts, logits, on_input=self.spec.on_input), valid)

    def logits(self, x: Tensor) -> Tensor:
        """[N, M] -> [N, E]."""
        return F.linear(x, self.weight, self.bias)

    def choose(self, scores: Tensor) -> Tensor:
        """[N, E] -> the chosen experts [N, k], the best first."""
        s = self.spec
        if self.correction is not None:
            scores = scores + self.correction
        if s.kept_groups < s.groups:
            scores = best_groups(scores, s.groups, s.kept_groups, s.group_top)
        return scores.topk(s.k, -1).indices


def best_groups(scores: Tensor, groups: int, kept: int, top: int) -> Tensor:
    """Scores [N, E] with -inf outside each token's ``kept`` best groups; 0 would beat corrected scores, which may be negative."""
    grouped = scores.unflatten(-1, (groups, -1))
    best = grouped.topk(top, -1).values.sum(-1).topk(kept, -1).indices
    dropped = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=scores.device).scatter(-1, best, False)
    return grouped.masked_fill(dropped[..., None], float("-inf")).flatten(-2)


def hide_padding(routing: Routing, valid: Tensor | None) -> Routing:
    """The routing with no choice where there is padding. valid: [B, T] or [T] bool, None where nothing is padding."""
    if valid is None:
        return routing
    valid = valid.flatten()
    weights = routing.weights.masked_fill(~valid[:, None], 0)
    return routing._replace(weights=weights, experts=routing.experts.masked_fill(~valid[:, None], -1), valid=valid, whole=False)
