"""Token embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Embed
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Embed, "tokens", source="Vaswani et al. 2017, arXiv:1706.03762, section 3.4", example={"vocab": 50})
@dataclass(frozen=True, kw_only=True)
class Tokens(Embed):
    """One learned vector per token id, times ``scale``."""

    vocab: int
    scale: float = 1.0

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        if self.vocab < 1:
            yield "vocab", f"must be at least 1, got {self.vocab}"

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return {"weight": TensorInfo((self.vocab, width))}

    def build(self, width: int) -> nn.Module:
        return TokenEmbedding(self, width)


class TokenEmbedding(nn.Embedding):
    """ids [B, T] int64 -> [B, T, M]."""

    def __init__(self, spec: Tokens, width: int):
        super().__init__(spec.vocab, width)
        self.spec = spec

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.weight)
        if self.spec.scale == 1.0:
            return x
        return x * x.new_tensor(self.spec.scale)  # rounded to the weight's dtype, as Gemma was trained
