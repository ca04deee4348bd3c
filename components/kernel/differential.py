"""Differential attention: the difference of two softmax maps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Ask, Kernel, Operands, Pattern, PositionModule, Projection, Step, View
from zoo.components.kernel._softmax import heads_last, scene
from zoo.components.ops.softmax import safe, wide
from zoo.components.ops.softmax.running import product
from zoo.components.registry import part
from zoo.components.spec import TensorInfo

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
INIT_STD = 0.1  # of the lambda vectors, section 2.1


def lambda_init(layer: int) -> float:
    """The share that a fresh layer subtracts; ``layer`` counts from 0 (the paper's l - 1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


@part(Kernel, "differential", source="Ye et al. 2024, arXiv:2410.05258, section 2.1")
@dataclass(frozen=True, kw_only=True)
class Differential(Kernel):
    """Neighbouring heads form a pair that attends with softmax(1) - lambda softmax(2), normed per pair: common noise cancels.

    A pair shares a value of twice the head width, so the projection's heads and key/value heads come in pairs (half as many heads
    as the paper's figures say). layer: sets lambda_init; None is the index of the layer that the kernel is built in.
    """

    layer: int | None = None
    eps: float = 1e-5
    masks = True

    def at_layer(self, index: int) -> Kernel:
        return replace(self, layer=index) if self.layer is None else self

    def refuses(self, ask: Ask) -> list[str]:
        return super().refuses(ask) + (["takes no position bias: those are made for single heads, not pairs"] if ask.bias else [])

    def problems(self, projection: Projection) -> Iterator[tuple[str, str]]:
        if projection.finishes:
            yield "", f"differential norms head outputs, which projection {projection.name} makes only after the kernel"
        if projection.heads % 2 or projection.groups % 2:
            yield "", f"differential pairs heads, but there are {projection.heads} and {projection.groups} key/value heads"

    def own_tensors(self, projection: Projection) -> dict[str, TensorInfo]:
        key, value = projection.widths
        return {name: TensorInfo((key,)) for name in LAMBDAS} | {"norm": TensorInfo((2 * value,))}

    def build(self, projection: Projection) -> nn.Module:
        return DifferentialKernel(*projection.widths, lambda_init(self.layer or 0), self.eps)


class DifferentialKernel(nn.Module):
    """lambda_* [D]: lambda = exp(q1 . k1) - exp(q2 . k2) + lambda_init. norm [2 Dv]: the weight of the pairs' RMS norm."""

    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def __init__(self, key: int, value: int, first: float, eps: float):
        super().__init__()
        self.first, self.eps = first, eps
        for name in LAMBDAS:
            setattr(self, name, nn.Parameter(torch.randn(key) * INIT_STD))
        self.norm = nn.Parameter(torch.ones(2 * value))

    def forward(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
        s = scene(replace(a, q=_firsts_first(a.q), k=_firsts_first(a.k)), view, step, pattern, position)
        first, second = safe(s.logits()).unflatten(1, (2, -1)).unbind(1)  # [B, G / 2, R, T, S]
        v = a.v.unflatten(2, (-1, 2)).flatten(-2).transpose(1, 2)[:, :, None]  # [B, G / 2, 1, S, 2 Dv]
        o = product(first - self.share() * second, v)
        normed = F.rms_norm(o, self.norm.shape, self.norm.to(o.dtype), self.eps) * (1 - self.first)
        return heads_last(normed, a.v).unflatten(-1, (2, -1)).flatten(2, 3)

    def share(self) -> Tensor:
        """lambda, a scalar."""
        q1, k1, q2, k2 = (wide(p) for p in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2))
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.first


def _firsts_first(x: Tensor) -> Tensor:
    """[B, T, heads, D]: the first heads of all pairs, then the second ones, so that grouping by key/value head keeps pairs apart."""
    return x.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2, 3)
