"""Token embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Embed, Norm, PositionEmbedding, Step, attach
from zoo.components.registry import part
from zoo.components.spec import Child, TensorInfo


@part(Embed, "tokens", source="Vaswani et al. 2017, arXiv:1706.03762, section 3.4", example={"vocab": 50})
@dataclass(frozen=True, kw_only=True)
class Tokens(Embed):
    """One learned vector per token id, times ``scale``.

    position: what is added for the position (GPT-2, OPT), None for nothing. norm: of the sum (BLOOM), None for none.
    """

    vocab: int
    scale: float = 1.0
    position: PositionEmbedding | None = None
    norm: Norm | None = None

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        if self.vocab < 1:
            yield "vocab", f"must be at least 1, got {self.vocab}"

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return {"weight": TensorInfo((self.vocab, width))}

    def children(self, width: int) -> dict[str, Child]:
        return {n: Child(spec, (width,)) for n, spec in (("position", self.position), ("norm", self.norm)) if spec is not None}

    def build(self, width: int) -> nn.Module:
        return TokenEmbedding(self, width)


class TokenEmbedding(nn.Embedding):
    """(ids [B, T] int64, step) -> [B, T, M]."""

    position: nn.Module | None
    norm: nn.Module | None

    def __init__(self, spec: Tokens, width: int):
        super().__init__(spec.vocab, width)
        self.spec, self.position, self.norm = spec, None, None
        attach(self, spec.children(width))

    def forward(self, ids: Tensor, step: Step) -> Tensor:
        x = F.embedding(ids, self.weight)
        if self.spec.scale != 1.0:
            x = x * x.new_tensor(self.spec.scale)  # rounded to the weight's dtype, as Gemma was trained
        if self.position is not None:
            x = self.position(x, step)
        return x if self.norm is None else self.norm(x)
