"""Language-model head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import Embed, Head, Linear, attach
from zoo.components.registry import part
from zoo.components.spec import Child, SpecError, TensorInfo, default


@part(Head, "lm", source="Press & Wolf 2016, arXiv:1608.05859 (tying)")
@dataclass(frozen=True, kw_only=True)
class LMHead(Head):
    """Logits over the vocabulary. tied: the weight is the embedding's own."""

    tied: bool = False
    bias: bool = False
    out: Linear = default(Linear, "dense")

    def tie(self) -> tuple[str, str] | None:
        return ("out.weight", "weight") if self.tied else None

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

    def build(self, width: int, embed: Embed) -> nn.Module:
        return LMHeadModule(self, width, embed)


class LMHeadModule(nn.Module):
    """[B, T, M] -> [B, T, V]."""

    out: nn.Module

    def __init__(self, spec: LMHead, width: int, embed: Embed):
        super().__init__()
        attach(self, spec.children(width, embed))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)
