"""Ring attention: a sequence spread over processes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from zoo.components.contracts import Kernel, Projection
from zoo.components.kernel._ring import RingBase, RingModule
from zoo.components.ops.ring import ring
from zoo.components.registry import part


@part(Kernel, "ring", source="Liu, Zaharia, Abbeel 2023, arXiv:2310.01889; striped order: Brandon et al. 2023, arXiv:2311.09431")
@dataclass(frozen=True, kw_only=True)
class RingAttention(RingBase):
    """Keys and values go round the processes of a group (``join``); autograd keeps every block. Fields: see RingBase."""

    softmax = True

    def build(self, projection: Projection) -> nn.Module:
        return RingModule(self.inner.build(projection), ring)
