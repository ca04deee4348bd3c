"""FP6 weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo.components.linear.packed_float import PackedFloat
from zoo.components.registry import part
from zoo.quantize.contracts import Quantizer
from zoo.quantize.methods._float import FloatQuantizer


@part(Quantizer, "fp6", source="Xia et al. 2024, arXiv:2401.14112 (FP6-LLM), section 2.2")
@dataclass(frozen=True, kw_only=True)
class FP6(FloatQuantizer):
    """6-bit floats with a float16 scale per output.

    element: E3M2, or E2M3 with more precision and less range.
    """

    element: Literal["e3m2", "e2m3"] = "e3m2"

    @property
    def storage(self) -> PackedFloat:
        return PackedFloat(element=self.element, scale="float16")
