"""AQLM with its codebooks and scales tuned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.linear.additive import blocks_of, weight_of
from zoo.components.registry import part
from zoo.quantize.contracts import Quantized, Quantizer
from zoo.quantize.methods._tuning import Tunable, Tuned
from zoo.quantize.methods.aqlm import AQLM


@part(Quantizer, "aqlm_tuned", source="Egiazarian et al. 2024, arXiv:2401.06118, section 3.4")
@dataclass(frozen=True, kw_only=True)
class TunedAQLM(AQLM, Tuned):
    """AQLM, then its codebooks and scales tuned for the error of a whole layer."""

    def tunable(self, result: Quantized, outputs: int, inputs: int) -> Tunable:
        module = self.storage.build(inputs, outputs, False)
        module.hold(result.tensors)
        return Codebooks(module.indices(), module.codebooks.float(), module.scales.float())


class Codebooks(Tunable):
    """Sums of code vectors. What is tuned of a scale is its change."""

    def __init__(self, indices: Tensor, codebooks: Tensor, scales: Tensor):
        self.indices, self.scales = indices, scales
        self.codebooks, self.factors = codebooks.clone().requires_grad_(), torch.ones_like(scales).requires_grad_()
        self.values = [self.codebooks, self.factors]

    def weight(self) -> Tensor:
        return weight_of(blocks_of(self.indices, self.codebooks) * (self.scales * self.factors))

    def tensors(self) -> dict[str, Tensor]:
        return {"codebooks": self.codebooks.detach().half(), "scales": (self.scales * self.factors).detach().half()}
