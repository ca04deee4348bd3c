"""GPTQ on grids of few-bit floats.

Shape legend: N outputs, K inputs, B inputs of a block. Inside, weights are transposed, [K, N], as in ``gptq``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from zoo.components.linear.packed_float import PackedFloat
from zoo.components.numerics import floats, scaled
from zoo.components.numerics.floats import Element
from zoo.components.registry import part
from zoo.quantize.contracts import Quantized, Quantizer
from zoo.quantize.methods import _damping
from zoo.quantize.methods._float import FloatQuantizer
from zoo.quantize.methods.gptq import alive, blocks, inverse_factor
from zoo.quantize.methods.nvfp4 import NVFP4
from zoo.quantize.stats.hessian import Hessian


@part(Quantizer, "gptq_float", source="Frantar et al. 2022, arXiv:2210.17323, with the nearest float in place of the nearest integer")
@dataclass(frozen=True, kw_only=True)
class GPTQFloat(Quantizer):
    """Round input by input to floats, correcting the inputs not yet rounded by the inverse Hessian of the calibration data.

    grid: the method whose scales and storage are taken, one of few-bit floats (``nvfp4``, ``{name: mxfp, element: e2m1}``, ``fp8``,
    ``fp6``); its scales are fitted to the weight before. damping: see gptq. order: of the inputs, as they stand (``natural``) or those of
    large activations first (``activation``). A matrix that cannot be factored, and a module that saw no token, is rounded to nearest, and
    the row says so.
    """

    calibrated = True

    grid: Quantizer = field(default_factory=NVFP4)
    damping: float = 0.01
    order: Literal["natural", "activation"] = "activation"

    def problems(self) -> Iterator[tuple[str, str]]:
        if not isinstance(self.grid, FloatQuantizer):
            yield (
                "grid",
                f"must be a method of few-bit floats (nvfp4, mxfp, fp8, fp6), got {self.grid.name}; gptq itself rounds to integers",
            )
        yield from _damping.problems(self.damping)

    @property
    def floats(self) -> FloatQuantizer:
        assert isinstance(self.grid, FloatQuantizer)
        return self.grid

    @property
    def storage(self) -> PackedFloat:
        return self.floats.storage

    def for_siblings(self, weights: Sequence[Tensor]) -> GPTQFloat:
        return replace(self, grid=self.grid.for_siblings(weights))

    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        if hessian is None or not hessian.tokens:
            return self._fallback(weight, hessian, "no tokens")
        weight, matrix = alive(weight, hessian)
        order = self._order(matrix.diagonal())
        factor, facts = inverse_factor(matrix[order][:, order], self.damping)
        if factor is None:
            return self._fallback(weight, hessian, "not factored")
        scale, tensor_scale = self.floats.fit(weight)
        grid = self.storage.grid
        steps = scaled.times(torch.ones_like(weight, dtype=torch.float32), scaled.effective(scale, tensor_scale, grid), grid)
        rounded = feed_back(weight[:, order], factor, steps[:, order], grid.element)
        result = self.floats.encoded(rounded[:, order.argsort()], scale, tensor_scale, hessian)
        return Quantized(result.tensors, facts | result.facts)

    def _order(self, sizes: Tensor) -> Tensor:
        """The order in which inputs are rounded, [K]. sizes: mean squares of the inputs."""
        if self.order == "natural":
            return torch.arange(len(sizes), device=sizes.device)
        return sizes.argsort(descending=True, stable=True)

    def _fallback(self, weight: Tensor, hessian: Hessian | None, why: str) -> Quantized:
        plain = self.grid.quantize(weight, hessian)
        reasons = [f"nearest: {why}", *(str(r) for r in [plain.facts.get("fallback")] if r)]
        return Quantized(plain.tensors, plain.facts | {"fallback": "; ".join(reasons)})


def feed_back(weight: Tensor, factor: Tensor, steps: Tensor, element: Element) -> Tensor:
    """The weight [N, K] rounded to numbers of an element times steps [N, K], input by input. factor [K, K]: see ``inverse_factor``."""
    left, steps = weight.t().contiguous(), steps.t().contiguous()
    for start, stop in blocks(len(left), None):
        error = _round_block(left[start:stop], factor[start:stop, start:stop], steps[start:stop], element)
        left[stop:].addmm_(factor[start:stop, stop:].t(), error, alpha=-1)
    return left.t()


def _round_block(left: Tensor, factor: Tensor, steps: Tensor, element: Element) -> Tensor:
    """Round a block [B, N] in place; returns the errors [B, N], each over its diagonal."""
    error, diagonal = torch.empty_like(left), factor.diagonal().tolist()
    for i in range(len(left)):
        value = floats.rounded(left[i] / steps[i], element).mul_(steps[i])
        error[i] = (left[i] - value).div_(diagonal[i])
        left[i] = value
        left[i + 1 :].addr_(factor[i, i + 1 :], error[i], alpha=-1)
    return error
