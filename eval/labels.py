"""Where to write the names of points so that they cover neither each other nor the points. Any unit of length, y upwards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Box = tuple[float, float, float, float]  # left, bottom, right, top
DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
DISTANCES = (1.0, 1.8, 3.0, 4.5, 6.5)  # times the clearance
ROUNDS = 4


def place(anchors: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], frame: Box, clear: float,
          obstacles: Sequence[Box] = ()) -> list[Box]:  # fmt: skip
    """A box for the label of each anchor: as near as can be without overlap, inside the frame.

    sizes: width and height of each label. clear: distance kept from the anchor's centre, half of it kept by other labels.
    obstacles: what labels had better not cover.
    """
    marks = [_box(x, y, clear, clear) for x, y in anchors]
    placed: list[Box] = []
    for i in [*range(len(anchors)), *list(range(len(anchors))) * (ROUNDS - 1)]:
        others = [b for j, b in enumerate(placed) if j != i] + [m for j, m in enumerate(marks) if j != i] + list(obstacles)
        best = min(_candidates(anchors[i], sizes[i], clear), key=lambda c: _cost(c[0], others, frame, sizes[i]) + c[1])[0]
        placed[i : i + 1] = [best]
    return placed


def overlap(a: Box, b: Box) -> float:
    """Area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _box(x: float, y: float, width: float, height: float) -> Box:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _candidates(anchor: tuple[float, float], size: tuple[float, float], clear: float) -> list[tuple[Box, float]]:
    """Boxes around an anchor, each with what its distance costs."""
    x, y = anchor
    width, height = size
    return [
        (_box(x + dx * (far * clear + width / 2), y + dy * (far * clear + height / 2), width, height), 0.05 * far + 0.01 * turn)
        for far, (turn, (dx, dy)) in itertools.product(DISTANCES, enumerate(DIRECTIONS))
    ]


def _cost(box: Box, others: Sequence[Box], frame: Box, size: tuple[float, float]) -> float:
    """Share of the label that is covered or sticks out."""
    area = size[0] * size[1]
    return (sum(overlap(box, other) for other in others) + area - overlap(box, frame)) / area
