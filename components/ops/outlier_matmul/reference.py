"""The plain product: Dettmers et al. 2022, arXiv:2208.07339, equation 8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.numerics import int8
from zoo.components.ops.int8_matmul import choose
from zoo.components.ops.outlier_matmul import OutlierMatmul
from zoo.components.registry import part


@part(OutlierMatmul, "reference", source="Dettmers et al. 2022, arXiv:2208.07339, section 3")
@dataclass(frozen=True, kw_only=True)
class Reference(OutlierMatmul):
    """Exact sums of integers, plus the outlier columns in the activation's dtype; on any device."""

    def refuses(self, device: torch.device) -> list[str]:
        return []

    def product(self, x: Tensor, weight: Tensor, absmax: Tensor, threshold: float) -> Tensor:
        codes, largest, columns = int8.encode_tokens(x, threshold)
        sums = choose(None, weight.shape[1], weight.shape[0], x.device).product(codes, weight)
        y = (sums * (largest[:, None] * absmax[None]) / int8.TOP**2).to(x.dtype)
        return y.addmm(x[:, columns], int8.decode_absmax(weight[:, columns], absmax, x.dtype).t())
