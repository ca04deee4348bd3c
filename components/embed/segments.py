"""Token, segment and position embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Embed, Norm, PositionEmbedding, Step, attach
from zoo.components.registry import part
from zoo.components.spec import Child, TensorInfo, default


@part(
    Embed,
    "segments",
    source="Devlin et al. 2018 (BERT), arXiv:1810.04805, section 3, figure 2",
    example={"vocab": 50, "position": {"name": "learned", "count": 40}},
)
@dataclass(frozen=True, kw_only=True)
class Segments(Embed):
    """The sum of one learned vector per token id, one per segment and what is added for the position; then a norm.

    Inputs are ids [B, T], all of segment 0, or [B, T, 2] with each token's id and segment. segments: how many there are.
    """

    vocab: int
    segments: int = 2
    position: PositionEmbedding
    norm: Norm = default(Norm, "layer")

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        for name in ("vocab", "segments"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return {"weight": TensorInfo((self.vocab, width)), "segment": TensorInfo((self.segments, width))}

    def children(self, width: int) -> dict[str, Child]:
        return {"position": Child(self.position, (width,)), "norm": Child(self.norm, (width,))}

    def size(self, inputs: Tensor) -> tuple[int, int]:
        if inputs.dim() != 3:
            return super().size(inputs)
        if inputs.shape[2] != 2:
            raise ValueError(f"inputs with segments must be [batch, tokens, 2] (id and segment), got {list(inputs.shape)}")
        kind = inputs[..., 1]
        if inputs.device.type == "cpu" and inputs.numel() and not 0 <= int(kind.min()) <= int(kind.max()) < self.segments:
            raise ValueError(f"segments must lie in 0..{self.segments - 1}, got {int(kind.min())}..{int(kind.max())}")
        return super().size(inputs[..., 0])

    def build(self, width: int) -> nn.Module:
        return SegmentEmbedding(self, width)


class SegmentEmbedding(nn.Module):
    """(ids [B, T] or [B, T, 2] int64, step) -> [B, T, M]."""

    position: nn.Module
    norm: nn.Module

    def __init__(self, spec: Segments, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(spec.vocab, width) * 0.02)
        self.segment = nn.Parameter(torch.randn(spec.segments, width) * 0.02)
        attach(self, spec.children(width))

    def forward(self, inputs: Tensor, step: Step) -> Tensor:
        if inputs.dim() == 3:
            x = F.embedding(inputs[..., 0], self.weight) + F.embedding(inputs[..., 1], self.segment)
        else:
            x = F.embedding(inputs, self.weight) + self.segment[0]
        return self.norm(self.position(x, step))
