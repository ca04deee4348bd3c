"""Fitting sums of code vectors to a weight (AQLM): first values by k-means, codes by beam search, vectors and scales by descent.

Shape legend: N rows of blocks, J blocks in a row, K codebooks of V vectors, D weights of a block (outputs times inputs).
The error of a weight E against its inputs' second moments H is tr(E H E^T).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.linear.additive import blocks_of, weight_of

CHUNK = 1 << 22  # scores computed at once
KMEANS = 25  # iterations at most


@dataclass
class Sums:
    """indices [N, J, K] int64, codebooks [K, V, outputs, inputs of a block] and scales [N, 1, 1, 1] float32."""

    indices: Tensor
    codebooks: Tensor
    scales: Tensor

    def weight(self) -> Tensor:
        return weight_of(blocks_of(self.indices, self.codebooks) * self.scales)


def first_values(weight: Tensor, shape: tuple[int, int, int, int], generator: torch.Generator) -> Sums:
    """Each codebook by k-means on what those before it leave. shape: of the codebooks."""
    count, size, outputs, inputs = shape
    blocks = weight.unflatten(0, (-1, outputs)).unflatten(2, (-1, inputs)).transpose(1, 2)  # [N, J, outputs, inputs]
    scales = blocks.square().mean((1, 2, 3), keepdim=True).sqrt().clamp(min=torch.finfo(torch.float16).tiny)
    left = (blocks / scales).flatten(2).flatten(0, 1)
    codes, books = [], []
    for _ in range(count):
        centres, code = k_means(left, size, generator)
        left = left - centres[code]
        codes.append(code.view(blocks.shape[:2]))
        books.append(centres.view(size, outputs, inputs))
    return Sums(torch.stack(codes, -1), torch.stack(books), scales)


def k_means(points: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Centres [count, D] and each point's, [points]. Centres that lose all points move to those worst served."""
    order = torch.randperm(len(points), generator=generator)
    centres = points[order.repeat(-(-count // len(points)))[:count].to(points.device)].clone()
    code = nearest(points, centres)
    for _ in range(KMEANS):
        sums = torch.zeros_like(centres).index_add_(0, code, points)
        sizes = torch.bincount(code, minlength=count)
        empty = (sizes == 0).nonzero()[:, 0][: len(points)]
        centres = torch.where(sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], centres)
        centres[empty] = points[(points - centres[code]).square().sum(-1).topk(len(empty)).indices]
        new = nearest(points, centres)
        if torch.equal(new, code):
            break
        code = new
    return centres, code


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Which centre is nearest: [points, D], [count, D] -> [points]."""
    half_norms = centres.square().sum(-1) / 2
    parts = points.split(max(1, CHUNK // len(centres)))
    return torch.cat([torch.addmm(half_norms, part, centres.t(), beta=-1).argmax(-1) for part in parts])


def descend(sums: Sums, weight: Tensor, matrix: Tensor, steps: int, rate: float) -> None:
    """Adam on codebooks and scales (AMSGrad, beta .95, no momentum, as in the paper's code); the rate is relative to their size."""
    signal = ((weight @ matrix) * weight).sum().clamp(min=torch.finfo(torch.float32).tiny)
    with torch.enable_grad():
        books, factors = sums.codebooks.clone().requires_grad_(), torch.ones_like(sums.scales).requires_grad_()
        adam = torch.optim.Adam([books, factors], lr=rate, betas=(0.0, 0.95), amsgrad=True)
        for _ in range(steps):
            error = weight - Sums(sums.indices, books, sums.scales * factors).weight()
            adam.zero_grad()
            (((error @ matrix) * error).sum() / signal).backward()
            adam.step()
    sums.codebooks, sums.scales = books.detach(), sums.scales * factors.detach()


def search(sums: Sums, weight: Tensor, matrix: Tensor, beam: int) -> None:
    """New codes, block by block, each the best that a beam search over the codebooks finds while the other blocks stand still."""
    error = weight - sums.weight()
    outputs, inputs = sums.codebooks.shape[2:]
    rows = max(1, CHUNK // (beam * sums.codebooks.shape[1]))
    for j in range(sums.indices.shape[1]):
        block = slice(j * inputs, (j + 1) * inputs)
        slope = (error @ matrix[:, block]).view(-1, outputs, inputs)
        problem = Block(sums.codebooks, matrix[block, block])
        for start in range(0, len(slope), rows):
            part = slice(start, start + rows)
            codes, step = problem.search(slope[part], sums.scales[part].flatten(1)[..., None], sums.indices[part, j], beam)
            sums.indices[part, j] = codes
            error[start * outputs : (start + len(step)) * outputs, block] -= step.flatten(0, 1)


class Block:
    """The choice of codes for one block of every row. A step d of the block changes the error by d H d^T - 2 d G, G the slope."""

    def __init__(self, codebooks: Tensor, matrix: Tensor):
        self.codebooks, self.matrix = codebooks, matrix
        self.norms = ((codebooks @ matrix) * codebooks).sum((2, 3))  # [K, V]

    def search(self, slope: Tensor, scale: Tensor, codes: Tensor, beam: int) -> tuple[Tensor, Tensor]:
        """Codes [N, K] and the step [N, outputs, inputs] from slope of that shape, scale [N, 1, 1] and the codes so far.

        Never worse than those: they are candidates throughout.
        """
        found = codes[:, None]  # [N, beam, K]
        step = torch.zeros_like(slope)[:, None]  # [N, beam, outputs, inputs]
        for k in range(len(self.codebooks)):
            base = step - scale[:, None] * self.codebooks[k][found[..., k]]
            scores = self._scores(base, slope, scale, k)  # [N, beam, V]
            best = scores.flatten(1).topk(min(beam, scores[0].numel()), largest=False).indices
            parent, vector = best // scores.shape[-1], best % scores.shape[-1]
            row = torch.arange(len(best), device=best.device)[:, None]
            found = found[row, parent].clone()
            found[..., k] = vector
            step = base[row, parent] + scale[:, None] * self.codebooks[k][vector]
        return found[:, 0], step[:, 0]

    def _scores(self, base: Tensor, slope: Tensor, scale: Tensor, k: int) -> Tensor:
        """What the error changes by for each vector of codebook k on top of ``base`` [N, beam, outputs, inputs]: [N, beam, V]."""
        pull = base @ self.matrix
        own = (pull * base).sum((2, 3)) - 2 * (slope[:, None] * base).sum((2, 3))
        across = 2 * (pull - slope[:, None]).flatten(2) @ self.codebooks[k].flatten(1).t()
        return own[..., None] + scale * across + scale.square() * self.norms[k]
