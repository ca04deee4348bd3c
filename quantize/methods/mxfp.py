"""Microscaling floats: groups of 32 that share a power of two."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from zoo.components.linear.packed_float import FloatInputs, PackedFloat
from zoo.components.numerics import scaled
from zoo.components.numerics.e8m0 import Rule
from zoo.components.numerics.floats import ElementName
from zoo.components.registry import part
from zoo.quantize.contracts import Quantizer
from zoo.quantize.methods._float import FloatQuantizer

GROUP = 32


@part(Quantizer, "mxfp", source="OCP Microscaling Formats 1.0 (2023), section 5; Rouhani et al. 2023, arXiv:2310.10537")
@dataclass(frozen=True, kw_only=True)
class MXFP(FloatQuantizer):
    """MXFP4 (e2m1), MXFP6 (e2m3, e3m2) or MXFP8 (e4m3, e5m2): groups of 32 inputs with an E8M0 scale.

    element: of the weights. input_element: of the inputs, rounded token by token in groups of 32; None: they are not rounded. scale_rule:
    how a weight group's scale is taken from its largest magnitude (OCP's is "floor"; with "ceil" nothing saturates); the scales of
    inputs follow "round".
    """

    element: ElementName = "e2m1"
    input_element: ElementName | None = None
    scale_rule: Rule = "round"

    @property
    def storage(self) -> PackedFloat:
        inputs = FloatInputs(element=self.input_element, group_size=GROUP, scale="e8m0") if self.input_element else None
        return PackedFloat(element=self.element, group_size=GROUP, scale="e8m0", inputs=inputs)

    def fit(self, weight: Tensor) -> tuple[Tensor, None]:
        return scaled.fit(weight, replace(self.storage.grid, rule=self.scale_rule)), None
