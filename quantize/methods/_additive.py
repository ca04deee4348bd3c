"""Fitting sums of code vectors to a weight (AQLM): first values by k-means, codes by beam search, vectors and scales by least squares.

Shape legend: N rows of blocks, J blocks in a row, K codebooks of V vectors, D weights of a block (outputs times inputs).
The error of a weight E against its inputs' second moments H is tr(E H E^T).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.linear.additive import blocks_of, weight_of

CHUNK, WIDE = 1 << 20, 1 << 26  # scores computed at once on the CPU, whose cache holds them, and elsewhere
KMEANS = 10  # iterations at most
POINTS = 64  # for each centre, drawn from all, that k-means looks at
PANEL = 128  # inputs, about, whose slopes are kept up to date by the search; those of others are computed when their turn comes


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
    """Centres [count, D] of a sample of the points, and each point's, [points]. Centres that lose all points move to those worst served."""
    order = torch.randperm(len(points), generator=generator).to(points.device)
    sample = points[order[: POINTS * count]]
    centres = sample.repeat(-(-count // len(sample)), 1)[:count].clone()
    code = nearest(sample, centres)
    for _ in range(KMEANS):
        sums = torch.zeros_like(centres).index_add_(0, code, sample)
        sizes = torch.bincount(code, minlength=count)
        empty = (sizes == 0).nonzero()[:, 0][: len(sample)]
        centres = torch.where(sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], centres)
        centres[empty] = sample[(sample - centres[code]).square().sum(-1).topk(len(empty)).indices]
        new = nearest(sample, centres)
        if torch.equal(new, code):
            break
        code = new
    return centres, nearest(points, centres)


def at_once(device: torch.device, scores: int) -> int:
    """How many rows of so many scores each."""
    return max(1, (CHUNK if device.type == "cpu" else WIDE) // scores)


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Which centre is nearest: [points, D], [count, D] -> [points]."""
    extended = torch.cat((centres, -centres.square().sum(-1, keepdim=True) / 2), 1).t()  # the norm in the product: one pass less
    parts = F.pad(points, (0, 1), value=1).split(at_once(points.device, len(centres)))
    return torch.cat([(part @ extended).argmax(-1) for part in parts])


def fit(sums: Sums, weight: Tensor, matrix: Tensor, steps: int) -> None:
    """Scales of least error for the codebooks, then codebooks for those scales and all codes together.

    The latter is a linear least-squares problem, of which ``steps`` steps of conjugate gradients are made from where it stands.
    """
    plain = weight_of(blocks_of(sums.indices, sums.codebooks))
    pulled = plain @ matrix
    wanted, power = ((pulled * x).unflatten(0, (len(sums.scales), -1)).sum((1, 2)).view_as(sums.scales) for x in (weight, plain))
    sums.scales = torch.where((wanted > 0) & (power > 0), wanted / power, sums.scales)
    normal = Normal(sums, matrix)
    left = normal.gathered((weight - sums.weight()) @ matrix)
    weighed = left / normal.diagonal
    direction, size = weighed, (left * weighed).sum()
    least = size * torch.finfo(size.dtype).eps  # below it there are but errors of rounding, which grow where vectors are not unique
    for _ in range(steps):
        if not size > least:
            return
        curved = normal.gathered(normal.spread(direction) @ matrix)
        length = size / (direction * curved).sum()
        sums.codebooks = sums.codebooks + length * direction
        left = left - length * curved
        weighed = left / normal.diagonal
        before, size = size, (left * weighed).sum()
        direction = weighed + size / before * direction


class Normal:
    """The least-squares problem of the codebooks while codes and scales stand still.

    diagonal: of its matrix, [K, V, outputs, inputs of a block], 1 for vectors that no block uses.
    """

    def __init__(self, sums: Sums, matrix: Tensor):
        self.shape, self.scales, self.indices = sums.codebooks.shape, sums.scales, sums.indices
        books, size, _, inputs = self.shape
        places = sums.indices.flatten(0, 1) + torch.arange(books, device=matrix.device) * size  # [N J, K]
        self.members = places.flatten().argsort() // books  # blocks, by the vectors that they use
        counts = torch.bincount(places.flatten(), minlength=books * size)
        self.starts = counts.cumsum(0) - counts
        squares = self.scales.square() * matrix.diagonal().view(-1, 1, inputs)  # [N, J, 1, inputs of a block]
        own = self._summed(squares.expand(-1, -1, self.shape[2], -1))
        self.diagonal = torch.where(own > 0, own, 1)

    def spread(self, codebooks: Tensor) -> Tensor:
        """The weight that vectors make."""
        return weight_of(blocks_of(self.indices, codebooks) * self.scales)

    def gathered(self, slope: Tensor) -> Tensor:
        """The transpose: what each vector's blocks of a weight's slope add up to."""
        outputs, inputs = self.shape[2:]
        return self._summed(slope.unflatten(0, (-1, outputs)).unflatten(2, (-1, inputs)).transpose(1, 2) * self.scales)

    def _summed(self, blocks: Tensor) -> Tensor:
        return F.embedding_bag(self.members, blocks.flatten(2).flatten(0, 1), self.starts, mode="sum").view(self.shape)


def search(sums: Sums, weight: Tensor, matrix: Tensor, beam: int) -> None:
    """New codes, block by block, each the best that a beam search over the codebooks finds while the other blocks stand still."""
    error, inputs = weight - sums.weight(), sums.codebooks.shape[3]
    size = max(1, PANEL // inputs) * inputs
    for start in range(0, len(matrix), size):
        panel = slice(start, min(start + size, len(matrix)))
        slope = error @ matrix[:, panel]  # [outputs, inputs of the panel]
        for first in range(panel.start, panel.stop, inputs):
            block = slice(first, first + inputs)
            step = _search_block(sums, slope[:, first - start : block.stop - start], matrix[block, block], first // inputs, beam)
            error[:, block] -= step
            slope[:, block.stop - start :].addmm_(step, matrix[block, block.stop : panel.stop], alpha=-1)


def _search_block(sums: Sums, slope: Tensor, matrix: Tensor, j: int, beam: int) -> Tensor:
    """New codes for block j of every row; returns the step of its weights, [outputs, inputs of a block]."""
    problem, scales = Block(sums.codebooks, matrix), sums.scales.flatten(1)[..., None]
    slope = slope.unflatten(0, (-1, sums.codebooks.shape[2]))
    rows, steps = at_once(slope.device, beam * sums.codebooks.shape[1]), []
    for start in range(0, len(slope), rows):
        part = slice(start, start + rows)
        codes, step = problem.search(slope[part], scales[part], sums.indices[part, j], beam)
        sums.indices[part, j] = codes
        steps.append(step.flatten(0, 1))
    return torch.cat(steps)


class Block:
    """The choice of codes for one block of every row. A step d of the block changes the error by d H d^T - 2 d G, G the slope."""

    def __init__(self, codebooks: Tensor, matrix: Tensor):
        self.codebooks, self.matrix = codebooks, matrix
        norms = ((codebooks @ matrix) * codebooks).sum((2, 3))
        self.vectors = torch.cat((codebooks.flatten(2), torch.ones_like(norms)[..., None], norms[..., None]), 2).mT  # [K, D + 2, V]

    def search(self, slope: Tensor, scale: Tensor, codes: Tensor, beam: int) -> tuple[Tensor, Tensor]:
        """Codes [N, K] and the step [N, outputs, inputs] from slope of that shape, scale [N, 1, 1] and the codes so far.

        Never worse than those: they are candidates throughout.
        """
        rows = torch.arange(len(codes), device=codes.device)[:, None]
        found, step = codes[:, None], torch.zeros_like(slope)[:, None]  # [N, beam, K], [N, beam, outputs, inputs]
        last = len(self.codebooks) - 1
        for k in range(last + 1):
            base = step - scale[:, None] * self.codebooks[k][found[..., k]]
            scores = self._scores(base, slope, scale, k)
            parent, vector = self._best(scores, 1 if k == last else beam)
            found = found[rows, parent]
            found[..., k] = vector
            step = base[rows, parent] + scale[:, None] * self.codebooks[k][vector]
        return found[:, 0], step[:, 0]

    def _best(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Those of least score, the beam's member and the vector of each: [N, beam, V] -> [N, count], [N, count]."""
        if count == 1:
            parent = scores.amin(-1).argmin(-1, keepdim=True)  # its place is sought where it is: that is slow
            return parent, scores[torch.arange(len(scores), device=scores.device), parent[:, 0]].argmin(-1, keepdim=True)
        best = scores.flatten(1).topk(min(count, scores[0].numel()), largest=False).indices
        return best // scores.shape[-1], best % scores.shape[-1]

    def _scores(self, base: Tensor, slope: Tensor, scale: Tensor, k: int) -> Tensor:
        """What the error changes by for each vector of codebook k on top of ``base`` [N, beam, outputs, inputs]: [N, beam, V].

        In units of the square of a row's scale. One product says it all: its last two inputs are what base costs, and 1 for the norms.
        """
        pull = base @ self.matrix
        own = ((pull - 2 * slope[:, None]) * base).sum((2, 3)) / scale[:, 0].square()
        across = (2 * (pull - slope[:, None]) / scale[:, None]).flatten(2)
        return torch.cat((across, own[..., None], torch.ones_like(own)[..., None]), 2) @ self.vectors[k]
