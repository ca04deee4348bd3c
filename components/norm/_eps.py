"""What all norms with an ``eps`` ask of it."""

from __future__ import annotations

import math
from collections.abc import Iterator


def eps_problems(eps: float) -> Iterator[tuple[str, str]]:
    """A mistake for a number whose sum with a mean square may have no root."""
    if not (math.isfinite(eps) and eps >= 0):
        yield "eps", f"must be a finite number that is not negative, got {eps}"
