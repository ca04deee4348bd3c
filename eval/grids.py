"""Plain tables of a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.eval.summary import number

GridCell = tuple[str, float | None]


@dataclass(frozen=True)
class Grid:
    """Headings, and rows of (text, value to sort by or None)."""

    headings: list[str]
    rows: list[list[GridCell]]

    def numeric(self, column: int) -> bool:
        """Whether a column has numbers."""
        return any(row[column][1] is not None for row in self.rows)

    def without_empty(self) -> Grid:
        """Less the columns in which nothing stands."""
        kept = [i for i in range(len(self.headings)) if any(row[i][0] not in ("", "–") for row in self.rows)]
        return Grid([self.headings[i] for i in kept], [[row[i] for i in kept] for row in self.rows])


def plain_grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """Mappings with whatever keys they have."""
    keys = list(dict.fromkeys(k for row in rows for k in row))
    return Grid(keys, [[(plain(row.get(k)), sortable(row.get(k))) for k in keys] for row in rows])


def plain(value: Any) -> str:
    """Any value of a results file in a table."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)


def sortable(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
