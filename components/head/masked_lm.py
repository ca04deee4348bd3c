"""Head that says which token was masked."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from zoo.components.contracts import Embed, Head, HeadModule, Linear, Norm
from zoo.components.head.lm import LMHead, LMHeadModule
from zoo.components.ops.activation import ACTIVATIONS, Activation
from zoo.components.registry import part
from zoo.components.spec import Child, default


@part(
    Head,
    "masked_lm",
    source="Devlin et al. 2018 (BERT), arXiv:1810.04805, section 3.1, task 1, and get_masked_lm_output of its code",
    example={"tied": False},
)
@dataclass(frozen=True, kw_only=True)
class MaskedLM(LMHead):
    """An lm head after a dense layer of the model's width, an activation and a norm.

    hidden_bias: of the dense layer; bias: of the output.
    """

    says_next = False

    tied: bool = True
    bias: bool = True
    activation: Activation = "gelu"
    hidden_bias: bool = True
    norm: Norm = default(Norm, "layer")
    hidden: Linear = default(Linear, "dense")

    def children(self, width: int, embed: Embed) -> dict[str, Child]:
        before = {"hidden": Child(self.hidden, (width, width, self.hidden_bias)), "norm": Child(self.norm, (width,))}
        return before | super().children(width, embed)

    def build(self, width: int, embed: Embed) -> HeadModule:
        return MaskedLMModule(self, width, embed)


class MaskedLMModule(LMHeadModule):
    """[..., M] -> [..., V]."""

    hidden: nn.Module
    norm: nn.Module

    def __init__(self, spec: MaskedLM, width: int, embed: Embed):
        super().__init__(spec, width, embed)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(self.activation(self.hidden(x))))
