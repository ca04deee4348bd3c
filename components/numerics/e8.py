"""Codebooks of 8-vectors cut out of the E8 lattice, the densest packing in eight dimensions (Tseng et al. 2024, QuIP#, section 4).

* E8P, 16 bits: the points of D8 + 1/2 (half-integers with an even sum) whose magnitudes are among 256 rows, moved by 1/4 one way or
  the other: 65,536 distinct points of E8 + 1/4. A word holds the row in bits 8..15, the signs of coordinates 0..6 in bits 1..7
  (1 is negative) and the move in bit 0 (1 is -1/4); the sign of coordinate 7 makes the sum even.
* E8, 8 bits: the origin, the 240 shortest points and 15 of norm 2.

A vector is rounded to 2 bits a weight by E8P, and its error by E8 (3 bits) or by E8P again (4 bits), as one number of 16, 24 or 32 bits:
the first code in the lowest. The rows and the 15 points are chosen by a rule, which costs no accuracy, so codes of QuIP#'s published
checkpoints mean other points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH = 8  # coordinates of a point
SHIFT = 0.25
ROWS = 8  # ways to sign a row of magnitudes that can be nearest to a vector whose first seven coordinates are positive
NEAR = 8  # points that a metric chooses among, for each way of moving
CHUNK = 2048  # vectors rounded at once: their scores take 16 MB
Bits = Literal[2, 3, 4]


@dataclass(frozen=True)
class Stages:
    """scale: the root mean square that normal values should have for the least error. residual: what errors are multiplied by before
    they are rounded again, 0 where they are not.
    """

    scale: float
    residual: float


STAGES: dict[int, Stages] = {2: Stages(1.03, 0), 3: Stages(0.98, 2.04), 4: Stages(1.03, 3.45)}


def encode(x: Tensor, bits: Bits, metric: Tensor | None = None) -> Tensor:
    """The codes of near points: [..., 8] float -> [...] int64 below 2^(8 bits). At 2 bits the nearest; then greedy in two stages.

    metric [8, 8]: near is what makes d metric d^T small for the difference d, else its length.
    """
    first, factor = nearest_e8p(x, metric), STAGES[bits].residual
    if bits == 2:
        return first
    rest = (x - decode(first, 2, x.dtype)) * factor
    second = nearest_e8(rest, metric) if bits == 3 else nearest_e8p(rest, metric)
    return first | second << 16


def decode(codes: Tensor, bits: Bits, dtype: torch.dtype = torch.float32) -> Tensor:
    """The points of codes: [...] integer -> [..., 8], by table; rounded once, and exact at 2 bits."""
    if bits == 2:
        return F.embedding(codes & 0xFFFF, e8p_table(codes.device, dtype))
    wide = torch.promote_types(dtype, torch.float32)
    table = e8_points(codes.device).to(wide) if bits == 3 else e8p_table(codes.device, wide)
    rest = F.embedding(codes >> 16 & (0xFF if bits == 3 else 0xFFFF), table)
    return (F.embedding(codes & 0xFFFF, e8p_table(codes.device, wide)) + rest / STAGES[bits].residual).to(dtype)


# ---- E8P ---------------------------------------------------------------------------------------------------------------------


def e8p(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The points of E8P words, bit by bit: [...] int64 -> [..., 8]. ``decode`` gives the same by table."""
    bits = codes[..., None] >> torch.arange(WIDTH, device=codes.device) & 1
    magnitude, negative = _magnitudes(codes.device)[codes >> 8 & 0xFF], bits[..., 1:]
    last = (magnitude.sum(-1).long() + negative.sum(-1)) & 1
    signs = 1 - 2 * torch.cat((negative, last[..., None]), -1)
    return (magnitude * signs + SHIFT * (1 - 2 * bits[..., :1])).to(dtype)


def nearest_e8p(x: Tensor, metric: Tensor | None = None) -> Tensor:
    """Words of the nearest points: [..., 8] float -> [...] int64. Exact, but with a metric the best of the NEAR nearest each way."""
    flat = x.reshape(-1, WIDTH).to(torch.float32)
    found = [_nearest_e8p(part, None if metric is None else metric.to(part)) for part in flat.split(CHUNK)]
    return torch.cat(found).view(x.shape[:-1]) if found else flat.new_empty(x.shape[:-1], dtype=torch.int64)


def _nearest_e8p(x: Tensor, metric: Tensor | None) -> Tensor:
    """[N, 8] -> [N]."""
    count = 1 if metric is None else NEAR
    words = torch.cat((_near_even(x - SHIFT, count), _near_even(x + SHIFT, count) | 1), 1)
    apart = F.embedding(words, e8p_table(x.device, x.dtype)) - x[:, None]
    size = ((apart if metric is None else apart @ metric) * apart).sum(-1)
    return words.gather(1, size.argmin(-1, keepdim=True))[:, 0]


def _near_even(y: Tensor, count: int) -> Tensor:
    """Words (bit 0 clear) of the nearest points before the move, nearest first: [N, 8] -> [N, count].

    An even number of sign changes makes all coordinates but the last positive, and keeps the lattice. Then the nearest point has at
    most one coordinate negative among the first seven.
    """
    negative = y < 0
    folded = y.abs()
    folded[:, -1] *= 1 - 2 * (negative.sum(-1) & 1)
    points, half_norms = _folded_points(y.device)
    best = torch.addmm(half_norms, folded, points, beta=-1).topk(count, -1).indices
    row, way = best // ROWS, best % ROWS
    places = torch.arange(1, WIDTH, device=y.device)
    flipped = negative[:, None, :-1] ^ (way[..., None] == places)
    return row << 8 | (flipped.long() << places).sum(-1)


@cache
def _folded_points(device: torch.device) -> tuple[Tensor, Tensor]:
    """Every row signed in 8 ways (none of the first seven negative, or one; the last makes the sum even): [8, 2048]; norms^2 / 2."""
    words = torch.arange(256)[:, None] << 8 | torch.cat((torch.zeros(1, dtype=torch.int64), 1 << torch.arange(1, WIDTH)))
    points = e8p(words.flatten()) - SHIFT
    return points.t().contiguous().to(device), (points.square().sum(-1) / 2).to(device)


@cache
def e8p_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """All points by word, [65536, 8]; every dtype holds them exactly."""
    with torch.inference_mode(False):
        return e8p(torch.arange(1 << 16, device=torch.device("cpu")), dtype).to(device)


@cache
def _magnitudes(device: torch.device) -> Tensor:
    """[256, 8]: the 227 of points of D8 + 1/2 with norm^2 up to 10, then the first 29 in lexicographic order with five 3/2 and no 5/2."""
    with torch.inference_mode(False), torch.device("cpu"):
        rows = torch.cartesian_prod(*[torch.tensor([0.5, 1.5, 2.5])] * WIDTH)
        norms = rows.square().sum(-1)
        last = rows[(norms == 12) & (rows < 2).all(-1)][:29]
        return torch.cat((rows[norms <= 10], last)).to(device)


# ---- E8 ----------------------------------------------------------------------------------------------------------------------


def nearest_e8(x: Tensor, metric: Tensor | None = None) -> Tensor:
    """Codes of the nearest points of the 8-bit codebook: [..., 8] float -> [...] int64. Exact, with a metric too."""
    points = e8_points(x.device)
    pulled = points if metric is None else points @ metric.to(points)
    scores = x.to(torch.float32) @ pulled.t() - (pulled * points).sum(-1) / 2
    return scores.argmax(-1)


@cache
def e8_points(device: torch.device) -> Tensor:
    """[256, 8] float32: all 241 points with norm^2 up to 2, integer ones first, then 2 e_i and all but the last of -2 e_i."""
    with torch.inference_mode(False), torch.device("cpu"):
        whole = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * WIDTH)
        halves = torch.cartesian_prod(*[torch.tensor([-0.5, 0.5])] * WIDTH)
        twos = 2 * torch.eye(WIDTH)
        norms = whole.square().sum(-1)
        kept = (whole[(norms == 0) | (norms == 2)], halves[halves.sum(-1) % 2 == 0], twos, -twos[:-1])
        return torch.cat(kept).to(device)
