"""FP8 weights, and FP8 inputs beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo.components.linear.packed_float import FloatInputs, PackedFloat
from zoo.components.registry import part
from zoo.quantize.contracts import Quantizer
from zoo.quantize.methods._float import FloatQuantizer

BLOCK = 128  # of DeepSeek-V3: outputs and inputs of a weight's block, channels of a token's group
INPUTS = {
    None: None,
    "token": FloatInputs(),
    "group": FloatInputs(group_size=BLOCK),
    "tensor": FloatInputs(scale=None, tensor_scale="multiplier"),
}


@part(Quantizer, "fp8", source="Micikevicius et al. 2022, arXiv:2209.05433; blocks: DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2")
@dataclass(frozen=True, kw_only=True)
class FP8(FloatQuantizer):
    """8-bit floats with float32 scales, largest magnitude / largest number.

    element: E4M3, or E5M2 with more range and a bit less precision. scale_per: what shares a scale: the whole tensor, an output
    (channel), or a block of 128 x 128. inputs: how they are rounded to E4M3: with a scale per token, per token and group of 128
    channels, or one fixed scale for all, which needs calibration data; None: not at all.
    """

    element: Literal["e4m3", "e5m2"] = "e4m3"
    scale_per: Literal["tensor", "channel", "block"] = "channel"
    inputs: Literal["token", "group", "tensor"] | None = None

    @property
    def storage(self) -> PackedFloat:
        outputs, inputs = {"tensor": (None, None), "channel": (1, None), "block": (BLOCK, BLOCK)}[self.scale_per]
        return PackedFloat(element=self.element, group_outputs=outputs, group_size=inputs, inputs=INPUTS[self.inputs])
