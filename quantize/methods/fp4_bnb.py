"""bitsandbytes' FP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zoo.components.numerics.blockwise import Codebook
from zoo.components.registry import part
from zoo.quantize.contracts import Quantizer
from zoo.quantize.methods.nf4 import NF4


@part(Quantizer, "fp4_bnb", source="bitsandbytes 0.50, get_4bit_type fp4")
@dataclass(frozen=True, kw_only=True)
class FP4BnB(NF4):
    """Round each weight to the nearest of bitsandbytes' own floats of 4 bits (not OCP's E2M1), block by block; needs no data."""

    codebook: ClassVar[Codebook] = "fp4"
