"""Signed integers of 8 bits with a scale for each row: weights by output, activations by token.

Shapes: M tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF_RANGE = 127.5  # half of what the codes -128 .. 127 span, as compressed-tensors fits a symmetric range
TOP = 127  # the largest code of LLM.int8, which leaves -128 out


def fit_rows(x: Tensor) -> Tensor:
    """The scale of each row, float32 [M, 1], for x [M, K]; never 0."""
    return (x.abs().amax(-1, keepdim=True).float() / HALF_RANGE).clamp_(min=torch.finfo(torch.float32).tiny)


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """The nearest codes, int8 [M, K], of halves the even one; scale [M, 1] or [1, 1]. Saturates; NaN has no code and becomes 0."""
    return (x.float() / scale).round_().clamp_(-128, 127).nan_to_num_(0).to(torch.int8)


def encode_absmax(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [N, K] and the largest magnitudes float32 [N] of a weight, which stands for code * absmax / 127 (LLM.int8).

    The weight is rounded to float16 first, as bitsandbytes does, save the rows that are ``beyond_float16``.
    """
    near = torch.where(beyond_float16(weight)[:, None], weight.float(), weight.half().float())
    absmax = near.abs().amax(-1)
    return _codes(near, absmax), absmax


def beyond_float16(weight: Tensor) -> Tensor:
    """Which rows of a weight [N, K] hold numbers that float16 has only as infinity, bool [N]."""
    return weight.half().isinf().any(-1)


def decode_absmax(codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``encode_absmax``, computed in float32 and rounded once: [N, K]."""
    return (codes.float() * (absmax / TOP)[:, None]).to(dtype)


def encode_tokens(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int8 [M, K], largest magnitudes float32 [M], and the outlier columns, int64 (Dettmers et al. 2022, section 3.2).

    A column is an outlier where any row of the call reaches the threshold; its codes are 0. The magnitudes are those below the
    threshold; x is rounded to float16 first, as bitsandbytes does. threshold 0: no column is.
    """
    half = x.to(torch.float16)
    high = half.abs() >= threshold if threshold else torch.zeros_like(half, dtype=torch.bool)
    low = half.masked_fill(high, 0)
    absmax = low.abs().amax(-1).float()
    columns = high.any(0).nonzero().flatten()
    return _codes(low, absmax).index_fill_(1, columns, 0), absmax, columns


def _codes(rows: Tensor, absmax: Tensor) -> Tensor:
    """Rows of zeros have codes 0."""
    inverse = torch.where(absmax > 0, TOP / absmax, 0)
    return (rows * inverse[:, None]).round_().to(torch.int8)
