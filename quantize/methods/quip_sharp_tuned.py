"""QuIP# with its signs tuned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.registry import part
from zoo.quantize.contracts import Quantized, Quantizer
from zoo.quantize.methods._tuning import Tunable, Tuned
from zoo.quantize.methods.quip_sharp import QuIPSharp


@part(Quantizer, "quip_sharp_tuned", source="Tseng et al. 2024, arXiv:2402.04396, section 5")
@dataclass(frozen=True, kw_only=True)
class TunedQuIPSharp(QuIPSharp, Tuned):
    """QuIP#, then a factor for each input and output in place of the signs, tuned for the error of a whole layer.

    The weights of the norms before rotated modules, which the paper tunes too, are among what the factors of inputs can say. Its second
    stage, the whole model with its last norm and head against the original's predictions, is left out.
    """

    def tunable(self, result: Quantized, outputs: int, inputs: int) -> Tunable:
        module = self.storage.build(inputs, outputs, False).to(result.tensors["input_signs"].device)
        module.hold(result.tensors)
        return Signs(module.dense_weight(torch.float32), module.input_signs.float(), module.output_signs.float())


class Signs(Tunable):
    """A rotated weight that has these signs already."""

    def __init__(self, weight: Tensor, inputs: Tensor, outputs: Tensor):
        self.middle = weight * inputs * outputs[:, None]  # a sign is its own inverse
        self.inputs, self.outputs = inputs.clone().requires_grad_(), outputs.clone().requires_grad_()
        self.values = [self.inputs, self.outputs]

    def weight(self) -> Tensor:
        return self.outputs[:, None] * self.middle * self.inputs

    def tensors(self) -> dict[str, Tensor]:
        return {"input_signs": self.inputs.detach().half(), "output_signs": self.outputs.detach().half()}
