"""Ring attention with the backward pass of flash attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from zoo.components.contracts import Ask, Kernel, Projection
from zoo.components.kernel._ring import RingBase, RingModule
from zoo.components.ops.ring import ring_flash
from zoo.components.registry import part


@part(Kernel, "ring_flash", source="Liu, Zaharia, Abbeel 2023, arXiv:2310.01889, with the backward pass of Dao 2023, arXiv:2307.08691")
@dataclass(frozen=True, kw_only=True)
class RingFlashAttention(RingBase):
    """As ``ring``, but keys and values go round again in the backward pass: memory is that of one block. Fields: see RingBase."""

    softmax = True

    def refuses(self, ask: Ask) -> list[str]:
        reasons = super().refuses(ask)
        return [*reasons, "has no gradient for the position's bias; use ring"] if ask.bias else reasons

    def build(self, projection: Projection) -> nn.Module:
        return RingModule(self.inner.build(projection), ring_flash)
