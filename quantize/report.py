"""What a quantization did, module by module."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from zoo.quantize.budget import Budget


@dataclass(frozen=True)
class Row:
    """One quantized module.

    tokens: calibration tokens that it saw. output_error: ||(W - Q) X|| / ||W X|| on them; both None without data. weight_error:
    ||W - Q|| / ||W||. bits_per_weight: scales and zeros included. facts: what the method did (damping, fallback).
    """

    module: str
    method: str
    settings: dict[str, Any]
    weights: int
    bits_per_weight: float
    weight_error: float
    tokens: int | None
    output_error: float | None
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """What a transform did at one place (path of the module whose outputs it changed), or why nothing (``skipped``)."""

    transform: str
    place: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """rows: the quantized modules in the order of the model. kept: linear modules left as they were. settings: of the whole run.

    changes: what transforms did before. budget: how widths were chosen, where they were.
    """

    rows: tuple[Row, ...]
    kept: tuple[str, ...]
    settings: dict[str, Any]
    seconds: float
    changes: tuple[Change, ...] = ()
    budget: Budget | None = None

    @property
    def totals(self) -> dict[str, Any]:
        """Sums and means over the quantized modules; errors are root mean squares over modules."""
        weights = sum(r.weights for r in self.rows)
        return {
            "modules": len(self.rows),
            "kept": len(self.kept),
            "weights": weights,
            "bits_per_weight": sum(r.weights * r.bits_per_weight for r in self.rows) / weights,
            "weight_error": _rms([r.weight_error for r in self.rows]),
            "output_error": _rms([r.output_error for r in self.rows if r.output_error is not None]),
            "fallbacks": sum("fallback" in r.facts for r in self.rows),
            "seconds": self.seconds,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data: settings, totals, rows, kept, changes, budget."""
        rows, changes = ([asdict(r) for r in found] for found in (self.rows, self.changes))
        return {"settings": self.settings, "totals": self.totals, "rows": rows, "kept": list(self.kept), "changes": changes,
                "budget": self.budget and self.budget.to_dict()}  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def table(self) -> Table:
        """The rows and totals for a terminal (``rich.print(report.table())``)."""
        from rich.table import Table

        total = self.totals
        table = Table(
            "module",
            "method",
            "bits",
            "group",
            "bits/weight",
            "tokens",
            "weight error",
            "output error",
            "seconds",
            "notes",
            show_footer=True,
        )
        for r in self.rows:
            grid = str(r.settings.get("bits", "-")), str(r.settings.get("group_size") or "-")
            cells = (
                f"{r.bits_per_weight:.2f}",
                _text(r.tokens, "d"),
                f"{r.weight_error:.4f}",
                _text(r.output_error, ".4f"),
                f"{r.seconds:.2f}",
            )
            table.add_row(r.module, r.method, *grid, *cells, ", ".join(f"{k} {v}" for k, v in r.facts.items()))
        footer = (f"{total['modules']} modules", "", "", "", f"{total['bits_per_weight']:.2f}", "", f"{total['weight_error']:.4f}",
                  _text(total["output_error"], ".4f"), f"{total['seconds']:.1f}", f"{total['fallbacks']} fallbacks")  # fmt: skip
        for column, text in zip(table.columns, footer, strict=True):
            column.footer = text
        return table


def _rms(values: list[float]) -> float | None:
    return math.sqrt(sum(v * v for v in values) / len(values)) if values else None


def _text(value: float | None, kind: str) -> str:
    return "-" if value is None else format(value, kind)
