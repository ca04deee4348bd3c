"""The second moment of a linear module's inputs, which is the Hessian of its squared output error (up to a factor)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK, WIDE = 384, 2048  # rows of the matrix computed at once, on the CPU and elsewhere; only blocks on and above the diagonal are


class Hessian:
    """Mean of x x^T over all tokens seen, [inputs, inputs] in ``dtype``.

    A running mean, so its scale does not grow with the data. Modules with the same input share one. largest: the greatest magnitude
    seen, a scalar.
    """

    def __init__(self, inputs: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.tokens = 0
        self._upper = torch.zeros(inputs, inputs, dtype=dtype, device=device)
        self._block = BLOCK if self._upper.device.type == "cpu" else WIDE
        self.largest = torch.zeros((), dtype=dtype, device=device)

    def update(self, x: Tensor) -> None:
        """Add the tokens of x [..., inputs]."""
        x = x.detach().reshape(-1, x.shape[-1]).to(self._upper.device)
        if not len(x):
            return
        self.tokens += len(x)
        self.largest = torch.maximum(self.largest, x.abs().amax())
        old, new = 1 - len(x) / self.tokens, 1 / self.tokens
        exact = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and self._upper.dtype == torch.float32
        x = x if exact else x.to(self._upper.dtype)
        for start in range(0, x.shape[1], self._block):
            rows = slice(start, start + self._block)
            part = self._upper[rows, start:]
            if exact:  # products of 16-bit numbers are exact in 32 bits, and many times faster made by the units for them
                part.mul_(old).add_(torch.mm(x[:, rows].t(), x[:, start:], out_dtype=torch.float32), alpha=new)
            else:
                part.addmm_(x[:, rows].t(), x[:, start:], beta=old, alpha=new)

    @property
    def width(self) -> int:
        """Inputs."""
        return len(self._upper)

    @property
    def finite(self) -> bool:
        """Whether all inputs were, and their squares."""
        return bool(self.largest.isfinite() & self._upper.diagonal().isfinite().all())

    def pooled(self, tokens: int, total: Callable[[Tensor], Tensor], most: Callable[[Tensor], Tensor]) -> Hessian:
        """That of several processes' tokens, ``tokens`` in all. total, most: sum a tensor, or take its maximum, over them in place."""
        result = Hessian(0, self._upper.dtype, self._upper.device)
        result.tokens = tokens
        result._upper = total(self._upper * (self.tokens / max(tokens, 1)))
        result.largest = most(self.largest.clone())
        return result

    @property
    def matrix(self) -> Tensor:
        """[inputs, inputs], symmetric; a copy."""
        full = self._upper.triu()
        lower = full.t()  # filled row by row of blocks, so that no second matrix is made
        for start in range(0, len(full), self._block):
            stop = start + self._block
            rows = slice(start, stop)
            lower[rows, stop:] = full[rows, stop:]
            full[rows, rows] += full[rows, rows].triu(1).t()
        return full


def relative_output_error(weight: Tensor, rounded: Tensor, hessian: Hessian) -> float:
    """||(W - Q) X|| / ||W X|| over the calibration inputs X; weights [outputs, inputs]. NaN if all inputs were zero."""
    matrix = hessian.matrix
    weight, rounded = weight.to(matrix), rounded.to(matrix)
    error, signal = (((w @ matrix) * w).sum() for w in (weight - rounded, weight))
    return float((error / signal).clamp(min=0).sqrt())
