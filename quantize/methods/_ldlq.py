"""LDLQ: round blocks of inputs from the last to the first, and let those still to come make good the error (QuIP, theorem 1; blocks
of more than one input: QuIP#, section 4.1). Then improve block by block while the others stand still.

What a step does to the inputs still to come is worked out at once within a panel of inputs, and for the others when their panel's
turn comes, as GPTQ does: large products in place of many small ones.

Shape legend: N outputs, K inputs, b inputs of a block, P inputs of a panel. What is worked on lies transposed, [K, N], so that a block
is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.quantize.methods import _damping

PANEL = 128  # inputs, about
GAIN = 4e-3  # of the error; a sweep that gains less is the last
# [N, b] and the metric [b, b] that says how much a step in each direction costs, None: all the same -> codes [N], and the values they
# stand for, [N, b]
Round = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Factor:
    """matrix [K, K] = lower D lower^T, lower with identities for its own blocks. middle: the blocks of D, [K / b, b, b]."""

    matrix: Tensor
    lower: Tensor
    middle: Tensor


@dataclass
class Rounding:
    """A weight on its way. codes: of each block, [K / b, N] int64. values: what they stand for, [K, N]. error: weight - values, [K, N]."""

    codes: Tensor
    values: Tensor
    error: Tensor

    def outputs(self, rows: Tensor) -> Rounding:
        """A copy of some outputs."""
        return Rounding(self.codes[:, rows], self.values[:, rows], self.error[:, rows])

    def replace(self, rows: Tensor, part: Rounding) -> None:
        self.codes[:, rows], self.values[:, rows], self.error[:, rows] = part.codes, part.values, part.error


def ldlq(weight: Tensor, factor: Factor, round: Round) -> Rounding:
    """Round a weight [N, K] with feedback."""
    blocks, width, _ = factor.middle.shape
    turned, lower = weight.t().contiguous(), factor.lower
    codes = torch.empty(blocks, len(weight), dtype=torch.int64, device=weight.device)
    found = Rounding(codes, torch.zeros_like(turned), turned.clone())
    for panel in panels(len(turned), width):
        pull = lower[panel.stop :, panel].t() @ found.error[panel.stop :]  # [P, N]
        for block, own in blocks_of(panel, width):
            k = block.start // width
            found.codes[k], values = round((turned[block] + pull[own]).t(), factor.middle[k])
            found.values[block] = values.t()
            found.error[block] -= found.values[block]
            pull[: own.start].addmm_(lower[block, panel.start : block.start].t(), found.error[block])
    return found


def descend(found: Rounding, hessian: Tensor, width: int, round: Round, sweeps: int) -> int:
    """Round each block anew to what is best while the others stand still, where that lowers the error; returns the sweeps made.

    Outputs do not touch each other, so one that a sweep leaves as it was is left out of those that follow. Ends before ``sweeps``
    where one gains too little.
    """
    inverse = torch.linalg.pinv(diagonal_blocks(hessian, width), hermitian=True)
    left = float(((hessian @ found.error) * found.error).sum())
    rows = torch.arange(found.error.shape[1], device=found.error.device)
    for done in range(sweeps):
        part = found.outputs(rows)
        gains = _sweep(part, hessian, inverse, round)
        found.replace(rows, part)
        gain = float(gains.sum())
        rows, left = rows[gains > 0], left - gain
        if gain <= GAIN * left:
            return done + 1
    return sweeps


def _sweep(part: Rounding, hessian: Tensor, inverse: Tensor, round: Round) -> Tensor:
    """Round every block anew; returns by how much each output's error fell, [N]."""
    width, gains = inverse.shape[-1], torch.zeros_like(part.error[0])
    for panel in panels(len(part.error), width):
        slope = hessian[panel] @ part.error  # [P, N]
        for block, own in blocks_of(panel, width):
            step, gain = _improve(part, block, slope[own], hessian[block, block], inverse[block.start // width], round)
            slope[: own.start].addmm_(hessian[panel.start : block.start, block], step, alpha=-1)
            gains += gain
    return gains


def _improve(part: Rounding, block: slice, slope: Tensor, metric: Tensor, inverse: Tensor, round: Round) -> tuple[Tensor, Tensor]:
    """Round one block anew: the step made, [b, N], and its gain, [N]. A step d changes the error by d^T H_kk d - 2 d^T (H E)_k."""
    old, k = part.values[block], block.start // len(inverse)
    codes, values = round((old + inverse @ slope).t(), metric)
    step = values.t() - old
    gain = ((2 * slope - metric @ step) * step).sum(0)
    better = gain > 0
    step = step * better
    old += step
    part.error[block] -= step
    part.codes[k] = torch.where(better, codes, part.codes[k])
    return step, gain * better


def panels(inputs: int, width: int) -> Iterator[slice]:
    """Runs of whole blocks, from the last to the first."""
    size = max(1, PANEL // width) * width
    return (slice(start, min(start + size, inputs)) for start in reversed(range(0, inputs, size)))


def blocks_of(panel: slice, width: int) -> Iterator[tuple[slice, slice]]:
    """The blocks of a panel, from the last to the first: among all inputs, and within the panel."""
    starts = reversed(range(panel.start, panel.stop, width))
    return ((slice(start, start + width), slice(start - panel.start, start - panel.start + width)) for start in starts)


def factored(matrix: Tensor, width: int) -> Factor | None:
    """By way of Cholesky's factor; None where there is none."""
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if failed or not lower.isfinite().all():
        return None
    own = diagonal_blocks(lower, width)
    unit = torch.einsum("knb,nbc->knc", lower.unflatten(1, (-1, width)), torch.linalg.inv(own)).flatten(1)
    return Factor(matrix, unit, own @ own.mT)


def damped_factor(matrix: Tensor, width: int, damping: float) -> tuple[Factor, dict[str, Any]] | None:
    """The factor of the matrix [K, K] over the mean of its diagonal, damped, and what it took.

    None where no damping of the ladder gives a finite factor.
    """
    scaled = matrix / matrix.diagonal().mean()
    for share, dtype in _damping.attempts(damping, matrix.dtype):
        damped = scaled.to(dtype, copy=True)
        damped.diagonal().add_(share)
        factor = factored(damped, width)
        if factor is not None:
            found = Factor(*(t.to(matrix.dtype) for t in (factor.matrix, factor.lower, factor.middle)))
            return found, _damping.facts(share, dtype, matrix.dtype)
    return None


def diagonal_blocks(matrix: Tensor, width: int) -> Tensor:
    """[K, K] -> [K / b, b, b]."""
    return matrix.unflatten(1, (-1, width)).unflatten(0, (-1, width)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
