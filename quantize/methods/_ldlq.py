"""LDLQ: round blocks of inputs from the last to the first, and let those still to come make good the error (QuIP, theorem 1; blocks
of more than one input: QuIP#, section 4.1). Then improve block by block while the others stand still.

Shape legend: N outputs, K inputs, b inputs of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LADDER = (0.01, 0.05, 0.1, 0.5, 1.0)  # dampings that are tried in turn where a matrix cannot be factored
# [N, b] and the metric [b, b] that says how much a step in each direction costs -> codes [N] and the values they stand for [N, b]
Round = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Factor:
    """matrix [K, K] = lower D lower^T, lower with identities for its own blocks. middle: the blocks of D, [K / b, b, b]."""

    matrix: Tensor
    lower: Tensor
    middle: Tensor


@dataclass
class Rounding:
    """A weight [N, K] on its way. codes: of each block. values: what they stand for, [N, K]. error: weight - values."""

    codes: list[Tensor]
    values: Tensor
    error: Tensor


def ldlq(weight: Tensor, factor: Factor, round: Round) -> Rounding:
    """Round with feedback."""
    width = factor.middle.shape[-1]
    found = Rounding([weight] * len(factor.middle), torch.zeros_like(weight), weight.clone())
    for k in reversed(range(len(found.codes))):
        block, later = slice(k * width, (k + 1) * width), slice((k + 1) * width, None)
        target = weight[:, block] + found.error[:, later] @ factor.lower[later, block]
        found.codes[k], found.values[:, block] = round(target, factor.middle[k])
        found.error[:, block] = weight[:, block] - found.values[:, block]
    return found


def descend(found: Rounding, hessian: Tensor, width: int, round: Round, sweeps: int) -> int:
    """Round each block anew to what is best while the others stand still, where that lowers the error; returns the sweeps made.

    Ends before ``sweeps`` where one changes less than a thousandth of the blocks.
    """
    blocks = len(found.codes)
    inverse = torch.linalg.pinv(diagonal_blocks(hessian, width), hermitian=True)
    for done in range(sweeps):
        changed = sum(_improve(found, k, hessian, inverse[k], round) for k in reversed(range(blocks)))
        if changed < 1e-3 * blocks * len(found.error):
            return done + 1
    return sweeps


def _improve(found: Rounding, k: int, hessian: Tensor, inverse: Tensor, round: Round) -> int:
    """Round one block anew; returns how many outputs changed. A step d of a block changes the error by d H_kk d^T - 2 d (E H)_k."""
    block = slice(k * len(inverse), (k + 1) * len(inverse))
    slope = found.error @ hessian[:, block]
    codes, values = round(found.values[:, block] + slope @ inverse, hessian[block, block])
    step = values - found.values[:, block]
    better = ((step @ hessian[block, block] - 2 * slope) * step).sum(-1) < 0
    step *= better[:, None]
    found.values[:, block] += step
    found.error[:, block] -= step
    found.codes[k] = torch.where(better, codes, found.codes[k])
    return int(better.sum())


def factored(matrix: Tensor, width: int) -> Factor | None:
    """By way of Cholesky's factor; None where there is none."""
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if failed or not lower.isfinite().all():
        return None
    own = diagonal_blocks(lower, width)
    unit = torch.einsum("knb,nbc->knc", lower.unflatten(1, (-1, width)), torch.linalg.inv(own)).flatten(1)
    return Factor(matrix, unit, own @ own.mT)


def damped_factor(matrix: Tensor, width: int, damping: float) -> tuple[Factor, float] | None:
    """The factor of the matrix [K, K] over the mean of its diagonal, damped, and the damping that it took.

    None where no damping of the ladder gives a finite factor. float64 is tried before more damping.
    """
    scaled = matrix / matrix.diagonal().mean()
    for share in (damping, *(step for step in LADDER if step > damping)):
        for dtype in (matrix.dtype, torch.float64):
            damped = scaled.to(dtype, copy=True)
            damped.diagonal().add_(share)
            factor = factored(damped, width)
            if factor is not None:
                return Factor(*(t.to(matrix.dtype) for t in (factor.matrix, factor.lower, factor.middle))), share
    return None


def diagonal_blocks(matrix: Tensor, width: int) -> Tensor:
    """[K, K] -> [K / b, b, b]."""
    return matrix.unflatten(1, (-1, width)).unflatten(0, (-1, width)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
