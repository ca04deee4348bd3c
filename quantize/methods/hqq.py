"""Half-quadratic quantization: zero points that make few large errors of many small ones.

Shape legend: N outputs, G groups, S inputs of a group. Inside, weights are [N, G, S], scales and zeros [N, G, 1].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zoo.components.linear.offset_int import ZERO, OffsetInt
from zoo.components.registry import part
from zoo.quantize.contracts import Quantized, Quantizer
from zoo.quantize.stats.hessian import Hessian

BETA, GROWTH = 10.0, 1.01  # of the penalty that ties the two halves of the problem, and how it grows: the published choice
CHUNK = 1 << 20  # weights at once


@part(Quantizer, "hqq", source="Badri and Shaji 2023, Half-Quadratic Quantization of Large Machine Learning Models")
@dataclass(frozen=True, kw_only=True)
class HQQ(Quantizer):
    """Scales span each group's range; zero points, between the codes, make the sum of |error| ** norm small. Needs no data.

    norm: below 1, so that outliers may err. iterations: at most; a group keeps the best zero point that it has had.
    """

    bits: Literal[2, 3, 4, 8] = 4
    group_size: int | None = 64
    norm: float = 0.7
    iterations: int = 20

    def problems(self) -> Iterator[tuple[str, str]]:
        if not 0 < self.norm <= 1:
            yield "norm", f"must be above 0 and at most 1, got {self.norm}"
        if self.iterations < 0:
            yield "iterations", f"must be at least 0, got {self.iterations}"

    @property
    def storage(self) -> OffsetInt:
        return OffsetInt(bits=self.bits, group_size=self.group_size)

    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        rows = max(1, CHUNK // weight.shape[1])
        parts = [self._fit(part.float()) for part in weight.split(rows)]
        codes, scale, zero = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return Quantized(self.storage.encode(codes, scale, zero))

    def _fit(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [N, K], scale and zero [N, G] in the stored dtype."""
        groups, top = weight.unflatten(-1, (self.storage.groups(weight.shape[1]), -1)), 2**self.bits - 1
        low, high = groups.aminmax(dim=-1, keepdim=True)
        low, high = low.clamp(max=0), high.clamp(min=0)  # so that zero points are no larger than codes, and stored as finely
        scale = ((high - low) / top).to(self.storage.dtype).clamp_(min=torch.finfo(self.storage.dtype).tiny)
        zero = self._best_zero(groups, scale.float(), -low / scale.float())
        codes = rounded(groups, scale.float(), zero.float(), top)
        return codes.to(torch.uint8).flatten(-2), scale[..., 0], zero[..., 0]

    def _best_zero(self, weight: Tensor, scale: Tensor, first: Tensor) -> Tensor:
        """[N, G, 1], stored: the zero point of least sum of |error| ** norm among those that the iteration from ``first`` passes."""
        top, zero = 2**self.bits - 1, first.to(ZERO).float()
        found, least = zero, torch.full_like(zero, torch.inf)
        for step in range(self.iterations + 1):
            codes = rounded(weight, scale, zero, top)
            error = weight - (codes - zero) * scale
            total = error.abs().pow(self.norm).sum(-1, keepdim=True)
            found, least = torch.where(total < least, zero, found), torch.minimum(total, least)
            outliers = shrunk(error, BETA * GROWTH**step, self.norm)
            zero = (codes - (weight - outliers) / scale).mean(-1, keepdim=True).to(ZERO).float()
        return found.to(ZERO)


def rounded(weight: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
    """The nearest codes, float."""
    return (weight / scale + zero).round_().clamp_(0, top)


def shrunk(error: Tensor, beta: float, norm: float) -> Tensor:
    """The outliers of an error: the (generalized) soft threshold that solves the l_p half of the problem (equation 4)."""
    size = error.abs()
    return error.sign() * (size - size.clamp(min=torch.finfo(size.dtype).tiny).pow(norm - 1) / beta).clamp_(min=0)
