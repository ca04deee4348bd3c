"""Round to nearest."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zoo.components.numerics import integer
from zoo.components.registry import part
from zoo.quantize.contracts import IntegerQuantizer, Quantized, Quantizer
from zoo.quantize.stats.hessian import Hessian


@part(Quantizer, "rtn", source="Jacob et al. 2017, arXiv:1712.05877, section 2.1 (the affine grid)")
@dataclass(frozen=True, kw_only=True)
class RTN(IntegerQuantizer):
    """Round each weight to the nearest point of its group's grid; needs no data."""

    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        scale, zero = self.fit(weight, self.storage.grid)
        return Quantized(self.storage.encode(integer.quantize(weight, scale, zero, self.bits), scale, zero))
