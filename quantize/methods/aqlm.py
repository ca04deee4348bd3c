"""AQLM: sums of learned code vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.components.linear.additive import MOST_BITS, Additive
from zoo.components.registry import part
from zoo.quantize.contracts import Quantized, Quantizer
from zoo.quantize.methods import _additive
from zoo.quantize.methods._additive import Sums
from zoo.quantize.stats.hessian import Hessian

TOLERANCE = 0.01  # relative gain of a round below which it is the last (the paper's code)


@part(Quantizer, "aqlm", source="Egiazarian et al. 2024, arXiv:2401.06118, without its fine-tuning of blocks")
@dataclass(frozen=True, kw_only=True)
class AQLM(Quantizer):
    """Every block of weights becomes a sum of one vector of each codebook, fitted to the layer's outputs.

    codebooks x bits / group is the bits of a weight, 2 by default; the codebooks come on top, codebooks x 2^bits x group x 16 bits for
    each matrix. rounds: at most, each a least-squares fit of scales and codebooks, of ``steps`` steps of conjugate gradients where the
    paper takes steps of Adam, and one beam search over all codes. beam: its width. seed: of the k-means that gives the first values.
    Without tokens all inputs count alike, and the row says so.

    A round takes about (steps + 3) x outputs x inputs^2 x 2 operations.
    """

    calibrated = True

    codebooks: int = 2
    bits: int = 8
    group: int = 8
    outputs_per_group: int = 1
    rounds: int = 6
    steps: int = 5
    beam: int = 4
    seed: int = 0

    def problems(self) -> Iterator[tuple[str, str]]:
        least = {"codebooks": 1, "bits": 1, "group": 1, "outputs_per_group": 1, "rounds": 1, "steps": 0, "beam": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                yield name, f"must be at least {bound}, got {getattr(self, name)}"
        if self.bits > MOST_BITS:
            yield "bits", f"must be at most {MOST_BITS}, got {self.bits}"

    @property
    def storage(self) -> Additive:
        return Additive(codebooks=self.codebooks, bits=self.bits, group=self.group, outputs_per_group=self.outputs_per_group)

    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        weight, seen = weight.float(), hessian is not None and hessian.tokens > 0
        matrix = hessian.matrix.to(weight) if hessian is not None and seen else torch.eye(weight.shape[1]).to(weight)
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.codebooks, 1 << self.bits, self.outputs_per_group, self.group)
        sums = _additive.first_values(weight, shape, generator)
        facts = self._fit(sums, weight, matrix) | ({} if seen else {"fallback": "plain error: no tokens"})
        tensors = {"codes": self.storage.stored(sums.indices), "codebooks": sums.codebooks.half(), "scales": sums.scales.half()}
        return Quantized(tensors, facts)

    def _fit(self, sums: Sums, weight: Tensor, matrix: Tensor) -> dict[str, Any]:
        """Rounds of fit and search. Vectors and scales are rounded as they are stored before codes are sought for them."""
        error = torch.inf
        for done in range(1, self.rounds + 1):
            _additive.fit(sums, weight, matrix, self.steps)
            sums.codebooks, sums.scales = sums.codebooks.half().float(), sums.scales.half().float()
            _additive.search(sums, weight, matrix, self.beam)
            left = weight - sums.weight()
            before, error = error, float(((left @ matrix) * left).sum())
            if not error < (1 - TOLERANCE) * before:
                return {"rounds": done}
        return {"rounds": self.rounds}
