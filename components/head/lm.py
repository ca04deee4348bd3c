"""Language-model head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Embed, Head, HeadModule, Linear, attach
from zoo.components.registry import part
from zoo.components.spec import Child, SpecError, TensorInfo, default


@part(Head, "lm", source="Press & Wolf 2016, arXiv:1608.05859 (tying); softcap: Gemma 2, arXiv:2408.00118, section 2")
@dataclass(frozen=True, kw_only=True)
class LMHead(Head):
    """Logits over the vocabulary. tied: the weight is the embedding's own.

    scale: multiplies the logits (Cohere; Granite divides by its logits_scaling). softcap: c in c * tanh(logits / c), after the
    scale; None for none.
    """

    says_next = True

    tied: bool = False
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    out: Linear = default(Linear, "dense")

    def tie(self) -> tuple[str, str] | None:
        return ("out.weight", "weight") if self.tied else None

    def problems(self, width: int, embed: Embed) -> Iterator[tuple[str, str]]:
        if self.softcap is not None and self.softcap <= 0:
            yield "softcap", f"must be positive, got {self.softcap}"

    def children(self, width: int, embed: Embed) -> dict[str, Child]:
        vocab = getattr(embed, "vocab", None)
        if vocab is None:
            raise SpecError([f"an lm head needs token embeddings, {embed.family} {embed.name} has no vocabulary"])
        return {"out": Child(self.out, (width, vocab, self.bias))}

    def tensors(self, width: int, embed: Embed) -> dict[str, TensorInfo]:
        held = super().tensors(width, embed)
        if self.tied:
            held.pop("out.weight", None)
        return held

    def build(self, width: int, embed: Embed) -> HeadModule:
        return LMHeadModule(self, width, embed)


class LMHeadModule(HeadModule):
    """[..., M] -> [..., V]."""

    out: nn.Module

    def __init__(self, spec: LMHead, width: int, embed: Embed):
        super().__init__()
        self.scale, self.softcap = spec.scale, spec.softcap
        attach(self, spec.children(width, embed))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.out(x)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
