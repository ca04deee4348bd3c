"""NTK-aware scaling that follows the length of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.contracts import RopeScaling
from zoo.components.registry import part
from zoo.components.rope_scaling._checks import positive


@part(
    RopeScaling,
    "dynamic_ntk",
    source="emozilla 2023 (dynamic NTK), as in transformers rope type 'dynamic'",
    example={"factor": 2.0, "context": 8},
)
@dataclass(frozen=True, kw_only=True)
class DynamicNTK(RopeScaling):
    """The base grows once a row is longer than ``context``; each row follows its own length.

    Keys that are already cached keep the frequencies of the length at which they were written.
    """

    factor: float
    context: int
    uses_length = True

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        yield from positive(self, "factor", "context")

    def frequencies(self, base: float, width: int, length: Tensor | None) -> Tensor:
        reach = (torch.tensor([self.context]) if length is None else length).clamp(min=self.context).float()
        grown = base * ((self.factor * reach / self.context) - (self.factor - 1)) ** (width / (width - 2))  # [B]
        exponent = torch.arange(0, width, 2, dtype=torch.int64, device=grown.device).float() / width
        return 1.0 / (grown[:, None] ** exponent)
