"""QuIP#: points of the E8 lattice after a rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from zoo.components.linear.e8p import E8P
from zoo.components.numerics import e8
from zoo.components.registry import part
from zoo.quantize.contracts import Quantizer
from zoo.quantize.methods._incoherent import Incoherent


@part(Quantizer, "quip_sharp", source="Tseng et al. 2024, arXiv:2402.04396, without its fine-tuning")
@dataclass(frozen=True, kw_only=True)
class QuIPSharp(Incoherent):
    """Rotate by signs and Hadamard matrices, then round eight inputs at a time with feedback to points of the E8 lattice (block LDLQ).

    What is near is measured by the factor's own block at first and by the Hessian's in the sweeps, which the paper's code leaves out:
    where eight inputs go together, the error falls by a tenth.
    """

    width: ClassVar[int] = e8.WIDTH

    bits: e8.Bits = 2

    @property
    def inner(self) -> E8P:
        return E8P(bits=self.bits)

    @property
    def spread(self) -> float:
        return e8.STAGES[self.bits].scale

    def round(self, x: Tensor, metric: Tensor | None) -> tuple[Tensor, Tensor]:
        codes = e8.encode(x, self.bits, metric)
        return codes, e8.decode(codes, self.bits, x.dtype)

    def pack(self, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return self.inner.encode(codes, scale)
