"""LLM.int8: 8 bits for weights by output and for inputs by token, but for the columns of outliers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zoo.components.linear.llm_int8 import LLMInt8 as Storage
from zoo.components.numerics import int8
from zoo.components.registry import part
from zoo.quantize.contracts import Quantized, Quantizer
from zoo.quantize.stats.hessian import Hessian


@part(Quantizer, "llm_int8", source="Dettmers et al. 2022, arXiv:2208.07339")
@dataclass(frozen=True, kw_only=True)
class LLMInt8(Quantizer):
    """Round each weight to the nearest multiple of a 127th of its output's largest magnitude; needs no data.

    threshold: the magnitude from which an input's column is multiplied without rounding.
    """

    threshold: float = 6.0

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from self.storage.problems(1, 1, False)

    @property
    def storage(self) -> Storage:
        return Storage(threshold=self.threshold)

    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        codes, absmax = int8.encode_absmax(weight)
        beyond = int(int8.beyond_float16(weight).sum())
        facts = {"fallback": f"{beyond} outputs not rounded to float16 before, which cannot hold their weights"} if beyond else {}
        return Quantized({"weight": codes, "absmax": absmax}, facts)
