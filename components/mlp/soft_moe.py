"""Soft mixture of experts: experts run on mixtures of tokens, so nothing is chosen and nothing is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import MLP, Call, Precise
from zoo.components.registry import part
from zoo.components.spec import Child, TensorInfo


@part(
    MLP,
    "soft_moe",
    source="Puigcerver et al. 2023, arXiv:2308.00951, section 2.1; normalisation: section 2.3",
    example={"experts": [{"repeat": 3, "name": "gated", "hidden": 8}]},
)
@dataclass(frozen=True, kw_only=True)
class SoftMoE(MLP):
    """Each expert runs on ``slots`` weighted means of a row's tokens; each token gets a weighted mean of all slots' outputs.

    Tokens and slot vectors are normalised before their product. A row's tokens see each other: not for causal models.
    """

    sees_padding = True

    experts: tuple[MLP, ...]
    slots: int = 1

    @property
    def causal(self) -> bool:
        return False

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        if not self.experts:
            yield "experts", "a mixture has at least one expert"
        if self.slots < 1:
            yield "slots", f"must be at least 1, got {self.slots}"
        for i, expert in enumerate(self.experts):
            if expert.sees_padding:
                yield f"experts.{i}", f"{expert.name} looks at padding, of which a slot has none"

    def children(self, width: int) -> dict[str, Child]:
        return {f"experts.{i}": Child(expert, (width,)) for i, expert in enumerate(self.experts)}

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        slots = len(self.experts) * self.slots
        return {"router.weight": TensorInfo((slots, width), "float32"), "router.scale": TensorInfo((), "float32")}

    def flops(self, call: Call, width: int) -> float:
        """Three products of all tokens with all slots (logits, gather, combine), and the experts on their slots."""
        slots = len(self.experts) * self.slots
        return 3 * 2 * call.new * slots * width + super().flops(call.tokens(self.slots), width)

    def build(self, width: int) -> nn.Module:
        return SoftMoEMLP(self, width)


class SlotRouter(Precise):
    """x [B, T, M] -> logits [B, T, slots] float32: scale * cosine of token and slot vector."""

    def __init__(self, width: int, slots: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(slots, width) * width**-0.5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.normalize(x.to(self.weight.dtype), dim=-1) @ (self.scale * F.normalize(self.weight, dim=-1)).T


class SoftMoEMLP(nn.Module):
    """x [B, T, M] or [T, M], valid [B, T] or [T] bool (None: nothing is padding) -> the shape of x."""

    def __init__(self, spec: SoftMoE, width: int):
        super().__init__()
        self.slots = spec.slots
        self.router = SlotRouter(width, len(spec.experts) * spec.slots)
        self.experts = nn.ModuleList(child.build() for child in spec.children(width).values())

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        logits = self.router(x)
        seen = logits if valid is None else logits.masked_fill(~valid[..., None], torch.finfo(logits.dtype).min)
        gather = seen.softmax(-2).transpose(-1, -2)  # over tokens
        tokens = x.to(gather.dtype) if valid is None else torch.where(valid[..., None], x, 0).to(gather.dtype)
        mixed = (gather @ tokens).to(x.dtype).split(self.slots, -2)
        done = torch.cat([expert(rows) for expert, rows in zip(self.experts, mixed, strict=True)], -2)
        return (logits.softmax(-1) @ done.to(logits.dtype)).to(x.dtype)  # over slots
