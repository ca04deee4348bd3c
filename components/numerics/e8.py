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
NEAR = 4  # rows that a metric chooses among, for each way of moving
CHUNK, WIDE = 1 << 11, 1 << 16  # vectors rounded at once on the CPU, whose cache holds their scores of 4 MB, and elsewhere
GROUPS = 16  # of the 256 rows, whose best are compared
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

    metric [8, 8]: near is what makes d metric d^T small for the difference d, else its length. It is asked in the last stage only:
    the second one finds its way back from what is near by length, and from there loses less.
    """
    factor = STAGES[bits].residual
    if bits == 2:
        return nearest_e8p(x, metric)
    first = nearest_e8p(x)
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


def quadrupled(codes: Tensor, table: Tensor) -> Tensor:
    """Points times 4, which are whole: [..., J] int32 or int64 and a table of ``octets`` -> [..., 8 J] int8.

    Eight numbers are fetched as one, which takes a fifth of the time that rows of floats take.
    """
    return table.index_select(0, codes.flatten()).view(torch.int8).view(*codes.shape[:-1], -1)


@cache
def octets(bits: Literal[8, 16], device: torch.device) -> Tensor:
    """The points of E8 (8 bits) or E8P (16) times 4, each as eight int8 in an int64: [2^bits]."""
    with torch.inference_mode(False):
        points = e8_points(device) if bits == 8 else e8p_table(device, torch.float32)
        return (4 * points).to(torch.int8).view(torch.int64)[:, 0]


# ---- E8P ---------------------------------------------------------------------------------------------------------------------


def e8p(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The points of E8P words, bit by bit: [...] int64 -> [..., 8]. ``decode`` gives the same by table."""
    bits = codes[..., None] >> torch.arange(WIDTH, device=codes.device) & 1
    magnitude, negative = _magnitudes(codes.device)[codes >> 8 & 0xFF], bits[..., 1:]
    last = (magnitude.sum(-1).long() + negative.sum(-1)) & 1
    signs = 1 - 2 * torch.cat((negative, last[..., None]), -1)
    return (magnitude * signs + SHIFT * (1 - 2 * bits[..., :1])).to(dtype)


def _chunks(vectors: Tensor) -> tuple[Tensor, ...]:
    return vectors.split(CHUNK if vectors.device.type == "cpu" else WIDE)


def nearest_e8p(x: Tensor, metric: Tensor | None = None) -> Tensor:
    """Words of the nearest points: [..., 8] float -> [...] int64. Exact, but with a metric the best of a few that are near."""
    flat = x.reshape(-1, WIDTH).to(torch.float32)
    found = [_nearest_e8p(part) if metric is None else _best_e8p(part, metric.to(part)) for part in _chunks(flat)]
    return torch.cat(found).view(x.shape[:-1]) if found else flat.new_empty(x.shape[:-1], dtype=torch.int64)


def _nearest_e8p(x: Tensor) -> Tensor:
    """[N, 8] -> [N]."""
    folded, scores = _moved_back(x)
    best, row = _greatest(scores)
    (plus, minus), (word, other) = best.view(2, -1), folded.words(row).view(2, -1)
    return torch.where(2 * (minus - plus) > x.sum(-1), other | 1, word)


def _best_e8p(x: Tensor, metric: Tensor) -> Tensor:
    """[N, 8], [8, 8] -> [N]: the best of the nearest, or of what is near it one step of the lattice away."""
    folded, scores = _moved_back(x)
    plus, minus = folded.words(_several(scores)).unflatten(1, (2, -1)).unbind(1)
    near = _least(torch.cat((plus, minus | 1)), x, metric)
    points = F.embedding(near, e8p_table(x.device, x.dtype))
    stepped = points + F.embedding(nearest_e8(x - points, metric), e8_points(x.device))
    return _least(torch.stack((near, _nearest_e8p(stepped))), x, metric)


def _least(words: Tensor, x: Tensor, metric: Tensor) -> Tensor:
    """The best of some words for each vector: [count, N], [N, 8], [8, 8] -> [N]."""
    apart = F.embedding(words, e8p_table(x.device, x.dtype)) - x
    return words.gather(0, ((apart @ metric) * apart).sum(-1).min(0, keepdim=True).indices)[0]


def _moved_back(x: Tensor) -> tuple[Folded, Tensor]:
    """[N, 8] before each move, first that by 1/4, then that by -1/4: [8, 2 N], and every row's score, [256, 2 N].

    A score is y p - p^2 / 2 for the best point p with the row's magnitudes. Its signs are those of y, but for the smallest of y where
    their sum would be odd. That is right where the smallest meets 1/2; where it meets more, another row is better still.
    """
    y = torch.cat((x.t() - SHIFT, x.t() + SHIFT), 1)
    pulled, _ = _rows(y.device)
    sizes = y.abs()
    least, place = sizes.min(0)
    signs = torch.mv((y < 0).float().t(), 2.0 ** torch.arange(WIDTH, device=y.device)).long()
    odd = _odd(y.device)[signs]
    price = least * odd
    priced = torch.cat((sizes, torch.stack((price, least - price, torch.ones_like(least)))))
    return Folded(signs, odd, place), pulled @ priced


@dataclass(frozen=True)
class Folded:
    """Signs of vectors, [N] int64 each: bit i is set where coordinate i is negative. odd: the bits' sum modulo 2. place: the coordinate
    whose sign costs least.
    """

    signs: Tensor
    odd: Tensor
    place: Tensor

    def words(self, row: Tensor) -> Tensor:
        """The words, with bit 0 clear, of the best points with these magnitudes: [..., N] -> [..., N]."""
        signs = self.signs ^ (self.odd ^ _rows(row.device)[1][row]) << self.place
        return row << 8 | (signs & 0x7F) << 1


def _greatest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest score of each vector and where it is: [256, N] -> [N], [N].

    By groups of rows: a maximum along the last dim, or one with its place, takes several times as long.
    """
    grouped = scores.unflatten(0, (GROUPS, -1))
    best, group = grouped.amax(1).max(0)
    return best, _within(grouped, group[None])[0]


def _several(scores: Tensor) -> Tensor:
    """Where the best of the NEAR best groups are: [256, N] -> [NEAR, N]."""
    grouped = scores.unflatten(0, (GROUPS, -1))
    return _within(grouped, grouped.amax(1).topk(NEAR, 0, sorted=False).indices)


def _within(grouped: Tensor, group: Tensor) -> Tensor:
    """The rows of the greatest scores of some groups: [groups, size, N], [count, N] -> [count, N]."""
    size = grouped.shape[1]
    return group * size + grouped.gather(0, group[:, None].expand(-1, size, -1)).max(1).indices


@cache
def _rows(device: torch.device) -> tuple[Tensor, Tensor]:
    """What sizes, the prices of a sign where the signs' sum is odd and where it is even, and 1 are multiplied by, [256, 11]; and
    whether the magnitudes' sum is odd, [256] int64.
    """
    with torch.inference_mode(False):
        rows = _magnitudes(device)
        odd = rows.sum(-1).long() & 1
        return torch.cat((rows, torch.stack((odd - 1, -odd, -rows.square().sum(-1) / 2), 1)), 1), odd


@cache
def _odd(device: torch.device) -> Tensor:
    """[256] int64: whether a byte has an odd number of bits."""
    with torch.inference_mode(False):
        return (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1).sum(-1) & 1


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
    half_norms, flat = (pulled * points).sum(-1, keepdim=True) / 2, x.reshape(-1, WIDTH).to(torch.float32)
    found = [_greatest(torch.addmm(half_norms, pulled, part.t(), beta=-1))[1] for part in _chunks(flat)]
    return torch.cat(found).view(x.shape[:-1]) if found else flat.new_empty(x.shape[:-1], dtype=torch.int64)


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
