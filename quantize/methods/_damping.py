"""The dampings of a Hessian that are tried in turn until it can be factored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

LADDER = (0.01, 0.05, 0.1, 0.5, 1.0)  # shares of the mean of the diagonal


def problems(damping: float) -> Iterator[tuple[str, str]]:
    if not 0 < damping <= LADDER[-1]:
        yield "damping", f"must be above 0 and at most {LADDER[-1]}, got {damping}"


def attempts(damping: float, dtype: torch.dtype) -> Iterator[tuple[float, torch.dtype]]:
    """(share, dtype): from the damping asked for upwards, each in the matrix's dtype and then in float64."""
    for share in (damping, *(step for step in LADDER if step > damping)):
        for kind in dict.fromkeys((dtype, torch.float64)):
            yield share, kind


def facts(share: float, kind: torch.dtype, dtype: torch.dtype) -> dict[str, Any]:
    """What a report says of the attempt that led to a factor."""
    return {"damping": share} | ({"factored_in": "float64"} if kind != dtype else {})
