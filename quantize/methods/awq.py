"""AWQ in one word: its scales, a search for the range of each group, and rounding to nearest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.numerics import integer
from zoo.components.registry import part
from zoo.quantize.contracts import IntegerQuantizer, Quantized, Quantizer
from zoo.quantize.stats.hessian import Hessian

STEPS, MOST = 20, 10  # the range is shrunk in twentieths, by less than a half


@part(Quantizer, "awq", source="Lin et al. 2023, arXiv:2306.00978, section 3.2; range: mit-han-lab/llm-awq, auto_clip")
@dataclass(frozen=True, kw_only=True)
class AWQ(IntegerQuantizer):
    """Round to nearest after the transform ``awq``, each group in the range after which its own part of the output is off least.

    clip: search the range; off for queries and keys, whose product is sensitive to it. Other fields: see rtn.
    """

    calibrated = True
    transforms = ("awq",)
    rules = tuple(f"*.projection.{name}={{clip: false}}" for name in ("q", "k", "q_up"))

    group_size: int | None = 128
    symmetric: bool = False
    clip: bool = True

    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        facts = {}
        clipped = weight
        if self.clip and hessian is not None and hessian.tokens:
            clipped, facts["clipped"] = self._clip(weight.to(hessian.matrix.dtype), hessian.matrix)
        elif self.clip:
            facts["fallback"] = "rtn: no tokens"
        scale, zero = self.fit(clipped, self.storage.grid)
        return Quantized(self.storage.encode(integer.quantize(clipped, scale, zero, self.bits), scale, zero), facts)

    def _clip(self, weight: Tensor, matrix: Tensor) -> tuple[Tensor, float]:
        """The weight [N, K] cut to the best range of each group, and the share of groups that were cut."""
        groups = self.storage.grid.groups(weight.shape[1])
        blocks = diagonal_blocks(matrix, groups)
        limit = weight.unflatten(1, (groups, -1)).abs().amax(-1)
        share, least = torch.ones_like(limit), torch.full_like(limit, torch.inf)
        for tried in (1 - step / STEPS for step in range(MOST)):
            error = group_error(weight - self.rounded(cut(weight, limit * tried)), blocks)
            share = torch.where(error < least, tried, share)
            least = torch.minimum(error, least)
        return cut(weight, limit * share), float((share < 1).float().mean())


def cut(weight: Tensor, limit: Tensor) -> Tensor:
    """weight [N, K] in -limit .. limit, limit [N, G]."""
    grouped, bound = weight.unflatten(1, (limit.shape[1], -1)), limit[..., None]
    return torch.minimum(torch.maximum(grouped, -bound), bound).flatten(1)


def diagonal_blocks(matrix: Tensor, groups: int) -> Tensor:
    """[K, K] -> [G, K/G, K/G], the second moments within each group."""
    size = len(matrix) // groups
    return torch.stack([matrix[i : i + size, i : i + size] for i in range(0, len(matrix), size)])


def group_error(off: Tensor, blocks: Tensor) -> Tensor:
    """Mean squared error [N, G] of what each group adds to the output, for weights [N, K] that are off by so much."""
    grouped = off.unflatten(1, (len(blocks), -1)).transpose(0, 1)
    return ((grouped @ blocks) * grouped).sum(-1).t()
