"""The second moment of a linear module's inputs, which is the Hessian of its squared output error (up to a factor)."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 384  # rows of the matrix computed at once; only blocks on and above the diagonal are, which saves a third


class Hessian:
    """Mean of x x^T over all tokens seen, [inputs, inputs] in ``dtype``.

    A running mean, so its scale does not grow with the data. Modules with the same input share one.
    """

    def __init__(self, inputs: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.tokens = 0
        self._upper = torch.zeros(inputs, inputs, dtype=dtype, device=device)

    def update(self, x: Tensor) -> None:
        """Add the tokens of x [..., inputs]."""
        x = x.detach().reshape(-1, x.shape[-1]).to(self._upper)
        if not len(x):
            return
        self.tokens += len(x)
        old, new = 1 - len(x) / self.tokens, 1 / self.tokens
        for start in range(0, x.shape[1], BLOCK):
            rows = slice(start, start + BLOCK)
            self._upper[rows, start:].addmm_(x[:, rows].t(), x[:, start:], beta=old, alpha=new)

    @property
    def matrix(self) -> Tensor:
        """[inputs, inputs], symmetric; a copy."""
        upper = self._upper.triu()
        return upper + upper.triu(1).t()


def relative_output_error(weight: Tensor, rounded: Tensor, hessian: Hessian) -> float:
    """||(W - Q) X|| / ||W X|| over the calibration inputs X; weights [outputs, inputs]. NaN if all inputs were zero."""
    matrix = hessian.matrix
    weight, rounded = weight.to(matrix), rounded.to(matrix)
    error, signal = (((w @ matrix) * w).sum() for w in (weight - rounded, weight))
    return float((error / signal).clamp(min=0).sqrt())
