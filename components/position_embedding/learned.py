"""Learned absolute positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import PositionEmbedding, Step
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(PositionEmbedding, "learned", source="Gehring et al. 2017, arXiv:1705.03122, section 3.1; BERT, GPT-2", example={"count": 40})
@dataclass(frozen=True, kw_only=True)
class Learned(PositionEmbedding):
    """Adds one learned vector per position, of which there are ``count``.

    offset: rows of the table before that of position 0 (2 in OPT, BART and RoBERTa).
    """

    count: int
    offset: int = 0

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        if self.count < 1:
            yield "count", f"must be at least 1, got {self.count}"
        if self.offset < 0:
            yield "offset", f"must not be negative, got {self.offset}"

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return {"weight": TensorInfo((self.count + self.offset, width))}

    def build(self, width: int) -> nn.Module:
        return LearnedModule(self, width)


class LearnedModule(nn.Module):
    """(x [B, T, M], step) -> [B, T, M]. Raises ValueError beyond the last position, where the host knows the positions."""

    def __init__(self, spec: Learned, width: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.randn(spec.count + spec.offset, width) * 0.02)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        last = _last(step)
        if last is not None and last >= self.spec.count:
            raise ValueError(f"the model has learned positions 0..{self.spec.count - 1}, the call reaches {last}; shorten the input")
        return x + F.embedding(step.pos.clamp(min=0) + self.spec.offset, self.weight)


def _last(step: Step) -> int | None:
    """The highest position, None where reading it would wait for a device."""
    if step.start is not None:
        return step.start + step.pos.shape[1] - 1
    return int(step.pos.max()) if step.pos.device.type == "cpu" and step.pos.numel() else None
