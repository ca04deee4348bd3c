"""What QuIP and QuIP# share: rotate, round with feedback, and say how to rotate back.

Shape legend: N outputs, K inputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.rotated import Rotated
from zoo.components.numerics.hadamard import random_signs, transform
from zoo.quantize.contracts import Quantized, Quantizer
from zoo.quantize.methods import _damping
from zoo.quantize.methods._ldlq import damped_factor, descend, ldlq
from zoo.quantize.stats.hessian import Hessian


@dataclass(frozen=True, kw_only=True)
class Incoherent(Quantizer):
    """A rotated matrix, rounded to one codebook times one scale.

    damping: added to the Hessian's diagonal, as a share of its mean. sweeps: at most, over all blocks, to improve on the first
    rounding; one that gains less than a 250th of the error is the last. seed: of the random signs. Without tokens each block is rounded
    to the nearest point, and the row says so.
    """

    calibrated = True
    width: ClassVar[int] = 1  # inputs that are rounded together

    damping: float = 0.01
    sweeps: int = 10
    seed: int = 0

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from _damping.problems(self.damping)
        if self.sweeps < 0:
            yield "sweeps", f"must be at least 0, got {self.sweeps}"

    @property
    @abstractmethod
    def inner(self) -> Linear:
        """The storage of the rotated weight."""

    @property
    @abstractmethod
    def spread(self) -> float:
        """The root mean square that values should have when they are rounded."""

    @abstractmethod
    def round(self, x: Tensor, metric: Tensor | None) -> tuple[Tensor, Tensor]:
        """[N, width] -> codes [N] int64, and what they stand for, [N, width]; metric [width, width]: what a step in each direction
        costs, None: all the same.
        """

    @abstractmethod
    def pack(self, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """The inner storage's tensors: codes [N, K / width], scale [1]."""

    @property
    def storage(self) -> Rotated:
        return Rotated(inner=self.inner)

    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        generator = torch.Generator().manual_seed(self.seed)
        inputs, outputs = (random_signs(n, generator).to(weight) for n in reversed(weight.shape))
        turned = transform(transform(weight * inputs).t() * outputs).t()
        scale = (turned.square().mean().sqrt() / self.spread).clamp(min=torch.finfo(torch.float32).tiny)
        codes, facts = self._round(turned / scale, self._turned_matrix(hessian, inputs))
        inner = self.pack(codes, scale.float().view(1))
        return Quantized(self.storage.encode(inner, inputs, outputs), facts)

    def _turned_matrix(self, hessian: Hessian | None, signs: Tensor) -> Tensor | None:
        """The Hessian of the rotated inputs, [K, K]; None where there are no tokens."""
        if hessian is None or not hessian.tokens:
            return None
        matrix = hessian.matrix.to(signs.dtype)
        return transform(transform(matrix * signs).t() * signs)

    def _round(self, weight: Tensor, matrix: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        """Codes [N, K / width] of a weight [N, K] that has the right spread."""
        damped = None if matrix is None else damped_factor(matrix, self.width, self.damping)
        if damped is None:
            why, blocks = "no tokens" if matrix is None else "not factored", weight.reshape(-1, self.width)
            return self.round(blocks, None)[0].view(len(weight), -1), {"fallback": f"nearest: {why}"}
        factor, facts = damped
        found = ldlq(weight, factor, self.round)
        sweeps = descend(found, factor.matrix, self.width, self.round, self.sweeps)
        return found.codes.t(), facts | {"sweeps": sweeps}
