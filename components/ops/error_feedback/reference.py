"""As the paper writes it: one input after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def round_run(left: Tensor, factor: Tensor, scale: Tensor, zero: Tensor, count: int, top: int) -> Tensor:
    error, diagonal = torch.empty_like(left[:count]), factor.diagonal().tolist()
    scales, zeros = scale.expand(count, -1), zero.expand(count, -1)
    for i in range(count):
        code = (left[i] / scales[i]).round_().add_(zeros[i]).clamp_(0, top)
        error[i] = (left[i] - (code - zeros[i]).mul_(scales[i])).div_(diagonal[i])
        left[i] = code
        left[i + 1 :].addr_(factor[i, i + 1 :], error[i], alpha=-1)
    return error
