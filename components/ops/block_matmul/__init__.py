"""Products with weights that are codes of 4 bits with a scale for each block (see ``numerics/blockwise.py``).

The tensors are those of ``linear bnb_4bit``: ``packed`` [ceil(N K / 2)] uint8, and ``absmax`` [blocks], float32, or uint8 with
``nested_absmax`` [ceil(blocks / 256)] and ``offset`` [1] float32. N outputs, K inputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zoo.components.numerics.blockwise import Codebook
from zoo.components.ops.choice import fastest
from zoo.components.spec import Spec

Held = Mapping[str, Tensor]


@dataclass(frozen=True)
class Form:
    """A weight [outputs, inputs] as an implementation must know it."""

    codebook: Codebook
    block_size: int
    inputs: int
    outputs: int


@dataclass(frozen=True, kw_only=True)
class BlockMatmul(Spec):
    """One implementation.

    rank: the order in which ``choose`` tries them, highest first.
    """

    family: ClassVar[str] = "block_matmul"
    rank: ClassVar[int] = 0

    @abstractmethod
    def refuses(self, form: Form, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Reasons why it cannot multiply this weight by inputs of this dtype on this device; empty means that it can."""

    @abstractmethod
    def product(self, form: Form, held: Held, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x; differentiable in x."""


def choose(wanted: BlockMatmul | None, form: Form, device: torch.device, dtype: torch.dtype) -> BlockMatmul:
    """``wanted``, or for None the fastest implementation that accepts. Raises ValueError with the reasons of one that refuses."""
    return fastest(BlockMatmul, wanted, form, device, dtype)
