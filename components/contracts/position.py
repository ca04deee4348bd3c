"""The families of position: rotary scaling, position in attention, position in the embedding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from zoo.components.contracts._declare import declare
from zoo.components.contracts.step import Step
from zoo.components.cost import Call
from zoo.components.spec import Spec, TensorInfo


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Spec):
    """How rope frequencies change beyond the trained context. No module: a pure function of the frequencies.

    uses_length: the frequencies change with the length of the sequence, so keys that are cached keep older ones.
    """

    family: ClassVar[str] = declare("rope_scaling", "how rotary frequencies are stretched beyond the trained context")
    uses_length: ClassVar[bool] = False

    def frequencies(self, base: float, width: int, length: Tensor | None) -> Tensor:
        """Angular frequencies [width/2] fp32, or [B, width/2] where they depend on ``length``, the rows' token count [B]."""
        raise NotImplementedError

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin."""
        return 1.0

    @property
    def logit_scale(self) -> float:
        """Multiplies the attention logits, rotated and unrotated parts alike."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Position(Spec):
    """How position enters attention. Built with (width of the rotated slice, query heads); see PositionModule.

    axes_turned: how many coordinates of a token (``Step.axes``) it, or the encoding that it builds on, turns by; 0: its position alone.
    """

    family: ClassVar[str] = declare("position", "how a token's position enters attention")
    has_bias: ClassVar[bool] = False

    @property
    def axes_turned(self) -> int:
        return max((part.axes_turned for part in vars(self).values() if isinstance(part, Position)), default=0)

    @abstractmethod
    def build(self, width: int, heads: int) -> PositionModule: ...


class PositionModule(nn.Module):
    """The hooks of a position encoding; each kind overrides what it is about. logit_scale is a constant of the kind."""

    logit_scale: float = 1.0

    def rotate(self, x: Tensor, step: Step) -> Tensor:
        """[B, T, heads, width] -> the same, turned by each token's position."""
        return x

    def temper(self, q: Tensor, step: Step) -> Tensor:
        """The kernel's queries [B, T, H, D] -> the same, scaled by each query's position."""
        return q

    def bias(self, qpos: Tensor, kpos: Tensor) -> Tensor | None:
        """Added to the logits: [B, H, T, S], or None."""
        return None


@dataclass(frozen=True, kw_only=True)
class PositionEmbedding(Spec):
    """How positions enter the embedding, once for all layers. Built with (model width); the module maps (x [B, T, M], step) to the
    same shape.
    """

    family: ClassVar[str] = declare("position_embedding", "how a token's position is added to its embedding")

    def bytes_read(self, call: Call, element_bytes: int, width: int) -> float:
        return bytes_of_rows(self.own_tensors(width), call, element_bytes)

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...


def bytes_of_rows(tables: Mapping[str, TensorInfo], call: Call, element_bytes: int) -> float:
    """Bytes read of tables of vectors, of which each new token reads one row."""
    return sum(min(1.0, call.new / t.shape[0]) * t.bytes(element_bytes) for t in tables.values())
