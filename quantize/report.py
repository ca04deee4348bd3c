"""What a quantization did, module by module."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from zoo.quantize.error_map import Measure, error_map, place
from zoo.weights import folded

if TYPE_CHECKING:
    from rich.table import Table

    from zoo.quantize.budget import Budget
    from zoo.quantize.verification import Findings

COLUMNS = ("module", "method", "bits", "group", "bits/weight", "tokens", "weight error", "output error", "seconds", "notes")


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

    changes: what transforms did before. budget: how widths were chosen, where they were. findings: of the checks before the work.
    """

    rows: tuple[Row, ...]
    kept: tuple[str, ...]
    settings: dict[str, Any]
    seconds: float
    changes: tuple[Change, ...] = ()
    budget: Budget | None = None
    findings: Findings | None = None

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
        """Plain data: settings, checks, totals, error_map, rows, kept, changes, budget."""
        rows, changes = ([asdict(r) for r in found] for found in (self.rows, self.changes))
        errors = error_map(self.rows)
        return {"settings": self.settings, "checks": self.findings and self.findings.to_dict(), "totals": self.totals,
                "error_map": errors and errors.to_dict(), "rows": rows, "kept": list(self.kept), "changes": changes,
                "budget": self.budget and self.budget.to_dict()}  # fmt: skip

    def to_json(self) -> str:
        """Numbers that are NaN or infinite, which JSON has not, are null."""
        return json.dumps(_plain(self.to_dict()), indent=2, allow_nan=False) + "\n"

    def table(self) -> Table:
        """The rows and totals for a terminal (``rich.print(report.table())``); the experts of a layer are one row."""
        from rich.table import Table

        table = Table(*COLUMNS, show_footer=True)
        for group in grouped(self.rows):
            grid = str(group.settings.get("bits", "-")), str(group.settings.get("group_size") or "-")
            cells = f"{group.bits_per_weight:.2f}", group.tokens, group.errors("weight_error"), group.errors("output_error")
            table.add_row(group.module, group.method, *grid, *cells, f"{group.seconds:.2f}", group.notes())
        for column, text in zip(table.columns, self._footer(), strict=True):
            column.footer = text
        return table

    def _footer(self) -> tuple[str, ...]:
        total = self.totals
        error = "-" if total["output_error"] is None else f"{total['output_error']:.4f}"
        return (f"{total['modules']} modules", "", "", "", f"{total['bits_per_weight']:.2f}", "", f"{total['weight_error']:.4f}", error,
                f"{total['seconds']:.1f}", f"{total['fallbacks']} fallbacks")  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Rows that are shown as one: a module, or the experts of a layer that were quantized in the same way."""

    rows: tuple[Row, ...]

    @property
    def module(self) -> str:
        return folded(row.module for row in self.rows)

    @property
    def method(self) -> str:
        return self.rows[0].method

    @property
    def settings(self) -> dict[str, Any]:
        return self.rows[0].settings

    @property
    def bits_per_weight(self) -> float:
        return sum(r.weights * r.bits_per_weight for r in self.rows) / sum(r.weights for r in self.rows)

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def tokens(self) -> str:
        """Of the module, or of the experts that saw the fewest and the most; "-" without data, while experts without any saw 0."""
        if all(row.tokens is None for row in self.rows):
            return "-"
        found = sorted(row.tokens or 0 for row in self.rows)
        return " to ".join(f"{n:,}" for n in dict.fromkeys((found[0], found[-1])))

    def error(self, measure: Measure) -> float | None:
        """The mean over the rows that have one."""
        found = [value for row in self.rows if (value := getattr(row, measure)) is not None]
        return sum(found) / len(found) if found else None

    def worst(self, measure: Measure) -> float | None:
        """The greatest of the rows."""
        return max((value for row in self.rows if (value := getattr(row, measure)) is not None), default=None)

    def errors(self, measure: Measure) -> str:
        """The error in words; of several modules the mean and the worst."""
        mean, worst = self.error(measure), self.worst(measure)
        if mean is None or worst is None:
            return "-"
        return f"{mean:.4f}" if len(self.rows) == 1 else f"{mean:.4f} (worst {worst:.4f})"

    def fact(self, name: str) -> str:
        """What the method did of one kind; the modules are counted where not all did the same."""
        found = Counter(str(row.facts[name]) for row in self.rows if name in row.facts)
        if len(self.rows) == 1 or list(found.values()) == [len(self.rows)]:
            return next(iter(found), "")
        return ", ".join(f"{value} ({count} of {len(self.rows)})" for value, count in found.items())

    def notes(self, *apart: str) -> str:
        """All facts in words, those named aside."""
        names = dict.fromkeys(name for row in self.rows for name in row.facts)
        return ", ".join(f"{name} {self.fact(name)}" for name in names if name not in apart)


def rows_of(modules: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of quantizers among plain data about modules, such as a results file has."""
    names = {field.name for field in fields(Row)}
    return [Row(**module) for module in modules if module.keys() == names]


def grouped(rows: Sequence[Row]) -> list[Group]:
    """The rows, those of a layer's experts that share method and settings as one group."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        where = place(row.module) or row.module
        found.setdefault((where, row.method, json.dumps(row.settings, sort_keys=True)), []).append(row)
    return [Group(tuple(group)) for group in found.values()]


def _plain(data: Any) -> Any:
    """Plain data with None in place of numbers that are NaN or infinite."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _rms(values: list[float]) -> float | None:
    return math.sqrt(sum(v * v for v in values) / len(values)) if values else None
