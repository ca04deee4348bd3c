"""NF4 and bitsandbytes' FP4: round to the nearest of 16 numbers, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from zoo.components.linear.bnb_4bit import BlockSize, BnB4Bit, Compute
from zoo.components.numerics.blockwise import Codebook
from zoo.components.registry import part
from zoo.quantize.contracts import Quantized, Quantizer
from zoo.quantize.stats.hessian import Hessian


@part(Quantizer, "nf4", source="Dettmers et al. 2023, arXiv:2305.14314 (QLoRA), section 3")
@dataclass(frozen=True, kw_only=True)
class NF4(Quantizer):
    """Round each weight to the nearest quantile of a normal distribution, times its block's largest magnitude; needs no data.

    block_size: weights that share a scale. nested: store the scales in 8 bits. compute: the dtype of products, None for the input's.
    """

    codebook: ClassVar[Codebook] = "nf4"

    block_size: BlockSize = 64
    nested: bool = False
    compute: Compute | None = None

    @property
    def storage(self) -> BnB4Bit:
        return BnB4Bit(codebook=self.codebook, block_size=self.block_size, nested=self.nested, compute=self.compute)

    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        return Quantized(self.storage.encode(weight))
