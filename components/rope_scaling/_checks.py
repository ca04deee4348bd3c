"""What scalings ask of their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zoo.components.contracts import RopeScaling


def positive(scaling: RopeScaling, *names: str) -> Iterator[tuple[str, str]]:
    """A mistake for each field that is zero, negative, infinite or NaN."""
    for name in names:
        value = getattr(scaling, name)
        if not (math.isfinite(value) and value > 0):
            yield name, f"must be a positive number, got {value}"
