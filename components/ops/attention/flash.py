"""FlashAttention in its three published loop orders. Readable references: one tile is one "block" here, not one thread block.

rows, columns: queries and keys per tile (B_r and B_c in the papers).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.components.ops.attention.reference import Scene
from zoo.components.ops.softmax import Partial, Running
from zoo.components.ops.softmax.running import divided, log_sum, product


def flash_v1(scene: Scene, rows: int, columns: int) -> Partial:
    """Keys outside, queries inside: each key block is read once, each output tile is read, renormalised and written per block.

    Source: Dao et al. 2022, arXiv:2205.14135, algorithm 1, where outputs in memory are always normalised.
    """
    tiles = [Running.start(tile.q, tile.v.shape[-1]) for tile in scene.row_blocks(rows)]
    for keys in scene.column_blocks(columns):
        for i, part in enumerate(keys.row_blocks(rows)):
            tiles[i] = _renormalised(tiles[i], part)
    return _joined([Partial(t.o, log_sum(t.total, t.top.masked_fill(t.total == 0, 0))) for t in tiles])


def _renormalised(tile: Running, part: Scene) -> Running:
    """The tile, its o normalised, with one more key block taken in (lines 10 to 13 of the algorithm)."""
    x = part.logits()
    top = torch.maximum(tile.top, x.detach().amax(-1))
    level = top.masked_fill(top == -torch.inf, 0)
    before, exps = tile.total * (tile.top - level).exp(), (x - level[..., None]).exp()
    total = before + exps.sum(-1)
    return Running(divided(tile.o * before[..., None] + product(exps, part.v), total), top, total)


def flash_v2(scene: Scene, rows: int, columns: int) -> Partial:
    """Queries outside, keys inside: an output tile stays in registers, is divided once, and tiles run in parallel.

    Source: Dao 2023, arXiv:2307.08691, algorithm 1.
    """
    return _joined([_swept(tile, columns) for tile in scene.row_blocks(rows)])


def _swept(tile: Scene, columns: int) -> Partial:
    run = Running.start(tile.q, tile.v.shape[-1])
    for part in tile.column_blocks(columns):
        run = run.add(part.logits(), part.v)
    return run.end()


def flash_v3(scene: Scene, rows: int, columns: int) -> Partial:
    """As v2, pipelined twice over: two warpgroups play ping-pong, one in its softmax while the other multiplies, and within a
    warpgroup the logits of block j + 1 are computed before the values of block j are added.

    Source: Shah et al. 2024, arXiv:2407.08608, sections 3.1 and 3.2, algorithm 2. The order of operations is the paper's; what
    runs at the same time on the device runs one after the other here.
    """
    tiles = scene.row_blocks(rows)
    pairs = [tiles[i : i + 2] for i in range(0, len(tiles), 2)]
    return _joined([done for pair in pairs for done in _ping_pong([_Warpgroup(tile, columns) for tile in pair])])


def _ping_pong(groups: list[_Warpgroup]) -> list[Partial]:
    for j in range(len(groups[0].blocks)):
        for group in groups:  # the barrier between warpgroups: one issues its products, then the other
            group.multiply(j)
        for group in groups:
            group.soften()
    return [group.drained() for group in groups]


class _Warpgroup:
    """One query tile on its way through the keys."""

    def __init__(self, tile: Scene, columns: int):
        self.blocks = tile.column_blocks(columns)
        self.o, self.top, self.total = Running.start(tile.q, tile.v.shape[-1])
        self.logits: Tensor | None = None
        self.weights: Tensor | None = None
        self.v: Tensor | None = None

    def multiply(self, j: int) -> None:
        """Issue S_j = q k_j^T, then o += P_{j-1} v_{j-1}: both products are in flight together."""
        self.logits = self.blocks[j].logits()
        self._add_values()
        self.v = self.blocks[j].v

    def soften(self) -> None:
        """Softmax of S_j, and the rescaling of what was added up to j - 1."""
        assert self.logits is not None
        top = torch.maximum(self.top, self.logits.detach().amax(-1))
        level = top.masked_fill(top == -torch.inf, 0)
        shrink = (self.top - level).exp()
        self.weights = (self.logits - level[..., None]).exp()
        self.o, self.total, self.top = self.o * shrink[..., None], self.total * shrink + self.weights.sum(-1), top

    def drained(self) -> Partial:
        self._add_values()
        return Running(self.o, self.top, self.total).end()

    def _add_values(self) -> None:
        if self.weights is not None and self.v is not None:
            self.o = self.o + product(self.weights, self.v)


def _joined(tiles: list[Partial]) -> Partial:
    return Partial(torch.cat([t.o for t in tiles], -2), torch.cat([t.lse for t in tiles], -1))
