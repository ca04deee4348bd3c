"""QuIP: evenly spaced values after a rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.linear.mid_rise import MidRise
from zoo.components.numerics import mid_rise
from zoo.components.registry import part
from zoo.quantize.contracts import Quantizer
from zoo.quantize.methods._incoherent import Incoherent


@part(Quantizer, "quip", source="Chee et al. 2023, arXiv:2307.13304, with the Hadamard rotation of arXiv:2402.04396, section 3")
@dataclass(frozen=True, kw_only=True)
class QuIP(Incoherent):
    """Rotate by signs and Hadamard matrices, then round input by input with feedback to evenly spaced values (LDLQ, greedy passes)."""

    bits: mid_rise.Bits = 2

    @property
    def inner(self) -> MidRise:
        return MidRise(bits=self.bits)

    @property
    def spread(self) -> float:
        return 1 / mid_rise.STEPS[self.bits]

    def round(self, x: Tensor, metric: Tensor | None) -> tuple[Tensor, Tensor]:
        del metric  # one input has but one direction
        codes = mid_rise.encode(x, self.bits)
        return codes[:, 0].long(), mid_rise.decode(codes, self.bits, x.dtype)

    def pack(self, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return self.inner.encode(codes.to(torch.uint8), scale)
