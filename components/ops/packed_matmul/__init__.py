"""Products with weights of few bits. An implementation is a memory layout and what is computed on it.

The canonical layout is that of compressed-tensors' ``pack-quantized``: ``packed`` [N, ceil(K * bits / 32)] int32, ``scale`` [N, G],
and for asymmetric grids ``zero`` [ceil(N * bits / 32), G] int32 (see ``numerics/integer.py``; N outputs, K inputs, G groups of K), for
scattered ones ``group_index`` [K] int32, the group of each input.
Every layout converts to and from it to the bit, so a checkpoint never depends on the machine that wrote it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components import registry
from zoo.components.numerics.integer import Grid
from zoo.components.spec import Spec

Layout = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    """A packed weight [outputs, inputs] as an implementation must know it before it is made. scattered: it has a ``group_index``."""

    grid: Grid
    inputs: int
    outputs: int
    scattered: bool = False


@dataclass(frozen=True, kw_only=True)
class PackedMatmul(Spec):
    """One implementation.

    rank: the order in which ``choose`` tries them, highest first.
    """

    family: ClassVar[str] = "packed_matmul"
    rank: ClassVar[int] = 0

    @abstractmethod
    def refuses(self, form: Form, device: torch.device) -> list[str]:
        """Reasons why it cannot hold this weight on this device; empty means that it can."""

    def widens(self, form: Form) -> bool:
        """True where the layout takes more bits per weight than are stored; ``choose`` takes it only by name."""
        return False

    @abstractmethod
    def from_canonical(self, form: Form, canonical: Mapping[str, Tensor]) -> Layout:
        """The tensors that are held in memory."""

    @abstractmethod
    def to_canonical(self, form: Form, layout: Layout) -> Layout:
        """The inverse of ``from_canonical``, to the bit."""

    @abstractmethod
    def product(self, form: Form, layout: Layout, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x; differentiable in x."""

    @abstractmethod
    def dense(self, form: Form, layout: Layout, dtype: torch.dtype) -> Tensor:
        """The weight, [N, K], rounded once to ``dtype``."""


def choose(wanted: PackedMatmul | None, form: Form, device: torch.device) -> PackedMatmul:
    """``wanted``, or for None the fastest implementation that accepts. Raises ValueError with the reasons of one that refuses."""
    if wanted is None:
        known = [part.spec() for part in registry.parts(PackedMatmul.family)]
        ranked = sorted((m for m in known if isinstance(m, PackedMatmul)), key=lambda m: -m.rank)
        return next(m for m in ranked if not m.refuses(form, device) and not m.widens(form))
    reasons = wanted.refuses(form, device)
    if reasons:
        raise ValueError(f"packed_matmul {wanted.name} {' and '.join(reasons)}; leave matmul out for the fastest that accepts")
    return wanted


def few(x: Tensor) -> bool:
    """Whether an operator for few rows pays and may be used: one token of each sequence, without gradient.

    The choice looks at one sequence, never at how many there are, so that a row's result does not depend on its batch.
    """
    tokens = x.shape[-2] if x.dim() > 2 else x.numel() // x.shape[-1]
    return tokens == 1 and not (x.requires_grad and torch.is_grad_enabled())


def rows_bfloat16(x: Tensor) -> Tensor:
    """[..., K] -> [rows, K]: the CPU operators are vectorised for this dtype only."""
    return x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()


def by_dense(weight: Tensor, x: Tensor) -> Tensor:
    """x W^T computed in the dtype of ``weight``, returned in that of x."""
    return F.linear(x.to(weight.dtype), weight).to(x.dtype)
