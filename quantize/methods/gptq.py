"""GPTQ: round input by input, and let the inputs still to come make good the error.

Shape legend: N outputs, K inputs, G groups. Inside, weights are transposed, [K, N], so that one input's weights are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from zoo.components.ops.error_feedback import round_run
from zoo.components.registry import part
from zoo.quantize.contracts import IntegerQuantizer, Quantized, Quantizer
from zoo.quantize.methods import _damping
from zoo.quantize.methods.rtn import RTN
from zoo.quantize.stats.hessian import Hessian

BLOCK = 128  # inputs rounded before the rest of the matrix is updated (section 3.3, step 2)


@part(Quantizer, "gptq", source="Frantar et al. 2022, arXiv:2210.17323")
@dataclass(frozen=True, kw_only=True)
class GPTQ(IntegerQuantizer):
    """Round input by input, correcting the inputs not yet rounded by the inverse Hessian of the calibration data.

    damping: added to the Hessian's diagonal, as a share of its mean. order: of the inputs. ``natural``: as they stand. ``activation``:
    those of large activations first, with scales fitted before, for groups stay runs of neighbours, of which nothing more is stored.
    ``groups``: whole groups, that with the largest activation first, and within each inputs of large activations first (GPTQModel's
    act_group_aware). static_groups: scales are fitted before in every order, not to the weights as they are corrected when the rounding
    arrives at a group. A matrix that cannot be factored is damped more, up to 1.0, in float32 then float64; where all fail, or no token
    was seen, the module is rounded to nearest, and its row says so.
    """

    calibrated = True

    damping: float = 0.01
    order: Literal["natural", "activation", "groups"] = "natural"
    static_groups: bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from _damping.problems(self.damping)

    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        if hessian is None or not hessian.tokens:
            return self._fallback(weight, "no tokens")
        weight, matrix = alive(weight, hessian)
        order = self._order(matrix.diagonal())
        factor, facts = inverse_factor(matrix if order is None else matrix[order][:, order], self.damping)
        if factor is None:
            return self._fallback(weight, "not factored")
        codes, scale, zero = self._round(weight, factor, order)
        return Quantized(self.storage.encode(codes, scale, zero), facts)

    def _order(self, sizes: Tensor) -> Tensor | None:
        """The order in which inputs are rounded, [K], None as they stand. sizes: mean squares of the inputs."""
        if self.order == "natural":
            return None
        if self.order == "activation":
            return sizes.argsort(descending=True, stable=True)
        grouped = sizes.view(self.storage.grid.groups(len(sizes)), -1)
        within = grouped.argsort(descending=True, stable=True)
        turns = grouped.amax(1).argsort(descending=True, stable=True)
        return (within + torch.arange(len(grouped), device=sizes.device)[:, None] * grouped.shape[1])[turns].flatten()

    def _fallback(self, weight: Tensor, why: str) -> Quantized:
        plain = RTN(bits=self.bits, group_size=self.group_size, symmetric=self.symmetric, scale_search=self.scale_search)
        return Quantized(plain.quantize(weight, None).tensors, {"fallback": f"rtn: {why}"})

    def _round(self, weight: Tensor, factor: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [N, K], scale and zero [N, G] for a weight [N, K] in its own order."""
        places = torch.arange(weight.shape[1], device=weight.device) if order is None else order
        groups, top = Groups(self, weight, places), self.storage.grid.top
        left = (weight.t() if order is None else weight.t()[order]).contiguous()
        for start, stop in blocks(len(left), None if groups.fixed else groups.size):
            error = torch.empty_like(left[start:stop])
            for first, last in groups.runs(start, stop):
                scale, zero = groups.at(first, last, left[first:])
                count = last - first
                error[first - start : last - start] = round_run(left[first:stop], factor[first:stop, first:stop], scale, zero, count, top)
            left[stop:].addmm_(factor[start:stop, stop:].t(), error, alpha=-1)
        codes = torch.empty_like(left, dtype=torch.uint8).index_copy_(0, places, left.to(torch.uint8))
        return codes.t().contiguous(), *groups.stored()


class Groups:
    """The grids of a weight's groups: fitted to the original weight, or each when the rounding arrives at it.

    places: of the inputs [K], in the order of the rounding. fixed: fitted before, as groups must be whose inputs are not rounded one
    after the other. size: inputs of a group.
    """

    def __init__(self, spec: GPTQ, weight: Tensor, places: Tensor):
        self.spec, self.grid = spec, spec.storage.grid
        self.size = self.grid.group_size or weight.shape[1]
        self.fixed = spec.order == "activation" or spec.static_groups or self.grid.group_size is None
        self.group = places // self.size
        self.turns = self.group[:: self.size].tolist()  # where groups are whole
        self.scale = weight.new_empty(self.grid.groups(weight.shape[1]), len(weight))  # [G, N], values of the stored dtype
        self.zero = torch.empty_like(self.scale)
        if self.fixed:
            self._fit(slice(None), weight)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Runs of inputs of a block whose grids are known once the first is arrived at."""
        size = BLOCK if self.fixed else min(self.size, BLOCK)
        for first in range(start, stop, size):
            yield first, min(first + size, stop)

    def at(self, first: int, last: int, left: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and zeros of a run of inputs, [1, N] where they share one. left [.., N]: the weights from there on, corrected so far."""
        if self.fixed:
            group = self.group[first:last]
            return (self.scale[group], self.zero[group]) if len(self.scale) > 1 else (self.scale, self.zero)
        group = self.turns[first // self.size]
        if first % self.size == 0:
            self._fit(slice(group, group + 1), left[: self.size].t())
        return self.scale[group : group + 1], self.zero[group : group + 1]

    def stored(self) -> tuple[Tensor, Tensor]:
        """Scale and zero [N, G] in their dtypes."""
        return self.scale.t().to(self.grid.scale_dtype).contiguous(), self.zero.t().to(torch.uint8).contiguous()

    def _fit(self, groups: slice, weight: Tensor) -> None:
        scale, zero = self.spec.fit(weight, self.grid)
        self.scale[groups], self.zero[groups] = scale.t(), zero.t()


def alive(weight: Tensor, hessian: Hessian) -> tuple[Tensor, Tensor]:
    """The weight [N, K] in the Hessian's dtype, and the Hessian [K, K], positive where an input was always 0.

    Weights of such inputs become 0: they do not matter, and must not widen the scales. Their places on the diagonal get the mean of the
    others, which is what a damping is a share of.
    """
    matrix = hessian.matrix
    diagonal = matrix.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1 if bool(dead.all()) else diagonal[~dead].mean()
    return weight.to(matrix.dtype).masked_fill(dead, 0), matrix


def blocks(inputs: int, group: int | None) -> Iterator[tuple[int, int]]:
    """Runs of about BLOCK inputs that hold whole groups: a group is fitted on weights that are corrected in full."""
    size = BLOCK if group is None else max(BLOCK // group, 1) * group
    for start in range(0, inputs, size):
        yield start, min(start + size, inputs)


def inverse_factor(matrix: Tensor, damping: float) -> tuple[Tensor | None, dict[str, Any]]:
    """The upper Cholesky factor of the inverse of the damped matrix, [K, K], and what it took.

    None where no damping of the ladder gives a finite factor.
    """
    mean = matrix.diagonal().mean()
    for share, dtype in _damping.attempts(damping, matrix.dtype):
        damped = matrix.to(dtype).flip(0, 1)
        damped.diagonal().add_(share * mean)
        factor = _inverse_factor(damped)
        if factor is not None:
            return factor.to(matrix.dtype), _damping.facts(share, dtype, matrix.dtype)
    return None, {}


def _inverse_factor(backwards: Tensor) -> Tensor | None:
    """U, upper triangular, with U^T U = matrix^-1, of a matrix whose order is reversed: the inverse of W, upper triangular, with
    W W^T = matrix, which is the Cholesky factor of the reversed matrix, itself reversed.
    """
    lower, failed = torch.linalg.cholesky_ex(backwards)
    if failed:
        return None
    upper = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    torch.linalg.solve_triangular(lower.flip(0, 1), upper, upper=True, out=upper)  # in place: the matrix may take a gigabyte
    return upper if bool(upper.sum().isfinite()) else None
