"""What a quantization did to each module, for people: a table, a heat map of the errors, and a page of its own for one model."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.eval.grids import Grid, GridCell, plain_grid
from zoo.eval.heat_map import Span, heat_map
from zoo.eval.pages import filled
from zoo.eval.results import write_atomic
from zoo.eval.summary import number
from zoo.quantize.error_map import Measure, error_map, place
from zoo.quantize.report import Group, Report, Row, grouped, rows_of

HEADINGS = ["module", "method", "settings", "bits / weight", "tokens", "output error", "weight error", "damping", "fallback", "notes",
            "seconds"]  # fmt: skip
APART = ("damping", "fallback")  # facts that have a column
TITLE = "## What the quantization lost"
WRITTEN = ("quantization_report.json", "quantization_report.html", "quantization_error.png")


@dataclass(frozen=True)
class Quantized:
    """The modules of one model as a page shows them. png: the heat map. count: of the modules. common: what holds for all of them.
    file: where there is a row for each.
    """

    png: bytes | None
    grid: Grid
    count: int
    common: str
    file: str

    @property
    def picture(self) -> str | None:
        """The heat map as an address that holds it."""
        return None if self.png is None else f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


def quantized(rows: Sequence[Row], file: str, scales: Mapping[Measure, Span]) -> Quantized:
    """scales: from and to which errors the heat map's colours go, see ``spans``."""
    errors, groups = error_map(rows), grouped(rows)
    png = None if errors is None else heat_map(errors, scales.get(errors.measure))
    return Quantized(png, module_grid(groups), len(rows), common(groups), file)


def spans(models: Sequence[Sequence[Row]]) -> dict[Measure, Span]:
    """The least and the greatest error of several models, by what was measured, so that their pictures have one scale."""
    found: dict[Measure, list[float]] = {}
    for errors in filter(None, map(error_map, models)):
        found.setdefault(errors.measure, []).extend(errors.span() or ())
    return {measure: (min(values), max(values)) for measure, values in found.items() if values}


def pictures(models: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Quantized]:
    """Of several models' rows, as results hold them, those that were quantized; the colours of their heat maps can be compared."""
    rows = {name: found for name, modules in models.items() if (found := rows_of(modules))}
    scales = spans(list(rows.values()))
    return {name: quantized(found, "results.json", scales) for name, found in rows.items()}


# ---- the table -----------------------------------------------------------------------------------------------------------------


def module_grid(groups: Sequence[Group]) -> Grid:
    """A row for each module, the experts of a layer together; columns in which nothing stands are left out."""
    shared = _shared(groups)
    return Grid(HEADINGS, [_grid_row(group, shared) for group in groups]).without_empty()


def common(groups: Sequence[Group]) -> str:
    """Method and settings that all modules share, in words."""
    methods = {group.method for group in groups}
    return ", ".join([*(f"method {name}" for name in methods if len(methods) == 1), *_settings(_shared(groups))])


def _grid_row(group: Group, shared: Mapping[str, Any]) -> list[GridCell]:
    own = {name: value for name, value in group.settings.items() if name not in shared}
    tokens = [row.tokens for row in group.rows if row.tokens is not None]
    return [(group.module, None), (group.method, None), (", ".join(_settings(own)), None),
            (f"{group.bits_per_weight:.2f}", group.bits_per_weight), (_dash(group.tokens), min(tokens) if tokens else None),
            _error(group, "output_error"), _error(group, "weight_error"), _number(group, "damping"), (group.fact("fallback"), None),
            (group.notes(*APART), None), (f"{group.seconds:.2f}", group.seconds)]  # fmt: skip


def _error(group: Group, measure: Measure) -> GridCell:
    return _dash(group.errors(measure)), group.error(measure)


def _number(group: Group, fact: str) -> GridCell:
    values = [float(row.facts[fact]) for row in group.rows if fact in row.facts]
    return group.fact(fact), max(values) if values else None


def _dash(text: str) -> str:
    return "–" if text == "-" else text


def _shared(groups: Sequence[Group]) -> dict[str, Any]:
    """The settings that are the same for all."""
    first = groups[0].settings if groups else {}
    return {name: value for name, value in first.items() if all(g.settings.get(name, g) == value for g in groups)}


def _settings(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name} {'none' if value is None else value}" for name, value in settings.items()]


# ---- files ---------------------------------------------------------------------------------------------------------------------


def picture_name(variant: str) -> str:
    """The file of a variant's heat map, in the folder of a run."""
    return "heat_maps/" + re.sub(r"[^\w.+=-]+", "_", variant) + ".png"


def write_quantization_report(report: Report, folder: str | Path, name: str) -> list[Path]:
    """Write the report of one quantization beside its weights, as JSON with every row, as a page and as a picture; returns the files.

    name: of the model. A README.md that is there gets a section on it. There is no picture where nothing was lost.
    """
    folder, found = Path(folder), quantized(report.rows, WRITTEN[0], {})
    content = [report.to_json().encode(), page(report, found, name).encode(), found.png]
    written = {folder / file: data for file, data in zip(WRITTEN, content, strict=True) if data is not None}
    readme = folder / "README.md"
    if readme.is_file():
        picture = None if found.png is None else WRITTEN[2]
        text = readme.read_text(encoding="utf-8").rstrip().partition(f"\n\n{TITLE}\n")[0]
        written[readme] = f"{text}\n\n{section(report.rows, WRITTEN[0], picture)}".encode()
    for path, data in written.items():
        write_atomic(path, data)
    return list(written)


def page(report: Report, found: Quantized, name: str) -> str:
    """The page as text."""
    changes = [{"transform": c.transform, "place": c.place, **c.facts} for c in report.changes]
    return filled("quantization.html.jinja", title=f"{name}: what the quantization did", totals=report.totals, found=found,
                  settings=report.settings, changes=plain_grid(changes), checks=report.findings, kept=", ".join(report.kept))  # fmt: skip


def section(rows: Sequence[Row], file: str, picture: str | None) -> str:
    """The section of a model card (Markdown). file: where there is a row for each module. picture: the heat map's file."""
    shown = [f"![error of every kind of module by layer]({picture})", ""] if picture else []
    about = ("Errors are ‖(W − Q) X‖ / ‖W X‖ on the calibration data, or ‖W − Q‖ / ‖W‖ of the weights where there was none. "
             f"`{file}` has a row for each module.")  # fmt: skip
    return "\n".join([TITLE, "", markdown(rows), "", *shown, about, ""])


def markdown(rows: Sequence[Row]) -> str:
    """A table of the errors by kind of module."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        where = place(row.module)
        kinds.setdefault(where[1] if where else row.module, []).append(row)
    head = ("kind of module", "modules", "bits / weight", "mean error", "worst error", "without data")
    lines = [head, ("---",) * len(head), *(_kind_cells(kind, Group(tuple(found))) for kind, found in kinds.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _kind_cells(kind: str, group: Group) -> tuple[str, ...]:
    measure: Measure = "output_error" if group.error("output_error") is not None else "weight_error"
    mean, worst = group.error(measure), group.worst(measure)
    errors = ("–" if value is None else f"{number(value)}{' (weights)' * (measure == 'weight_error')}" for value in (mean, worst))
    fallbacks = sum("fallback" in row.facts for row in group.rows)
    return f"`{kind}`", f"{len(group.rows):,}", f"{group.bits_per_weight:.2f}", *errors, str(fallbacks or "–")
