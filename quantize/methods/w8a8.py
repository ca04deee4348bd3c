"""Weights and inputs in integers of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from zoo.components.linear.int8 import Int8
from zoo.components.numerics import int8, integer
from zoo.components.registry import part
from zoo.quantize.contracts import IntegerQuantizer, Quantized, Quantizer
from zoo.quantize.methods.gptq import GPTQ
from zoo.quantize.methods.rtn import RTN
from zoo.quantize.stats.hessian import Hessian


@part(Quantizer, "w8a8", source="Xiao et al. 2022, arXiv:2211.10438 (SmoothQuant), section 3")
@dataclass(frozen=True, kw_only=True)
class W8A8(Quantizer):
    """Weights as another method rounds them to 8 bits with a scale per output, inputs rounded to 8 bits as they come.

    weights: rtn or gptq, with bits 8, group_size null and symmetric. inputs: each token has the scale that spans it, or ("tensor") all
    have the one that spans the calibration data.
    """

    weights: Quantizer = RTN(bits=8, group_size=None)
    inputs: Literal["token", "tensor"] = "token"

    def problems(self) -> Iterator[tuple[str, str]]:
        weights = self.weights
        plain = isinstance(weights, RTN | GPTQ) and (weights.bits, weights.group_size, weights.symmetric) == (8, None, True)
        if not plain:
            yield "weights", "must be rtn or gptq of 8 bits per output: {name: gptq, bits: 8, group_size: null}"

    @property
    def calibrated(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] (here it depends on the settings)
        return self.inputs == "tensor" or self.weights.calibrated

    @property
    def storage(self) -> Int8:
        return Int8(inputs=self.inputs)

    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        assert isinstance(self.weights, IntegerQuantizer)
        found = self.weights.quantize(weight, hessian)
        codes = integer.unpack(found.tensors["packed"], 8, weight.shape[1])
        tensors, facts = self.storage.encode(codes, found.tensors["scale"]), dict(found.facts)
        if self.inputs == "tensor":
            seen = hessian is not None and hessian.tokens > 0
            tensors["input_scale"] = int8.fit_rows((hessian.largest if hessian and seen else weight.new_ones(())).reshape(1, 1))[0]
            facts |= {} if seen else {"fallback": "inputs not scaled: no tokens"}
        return Quantized(tensors, facts)
