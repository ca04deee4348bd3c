"""What a comparison found, for people: a console table, one HTML file that needs nothing else, and the chart of the trade-off."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.eval.changes import SURE, is_accuracy, stderr_of
from zoo.eval.grids import Grid, plain, plain_grid
from zoo.eval.pages import filled
from zoo.eval.pareto import pareto_chart
from zoo.eval.quantization import Quantized, picture_name, pictures
from zoo.eval.results import Results, Variant, write_atomic
from zoo.eval.summary import NOT_MEASURED, Cell, Column, Summary, number, share, summarize
from zoo.quantize.report import rows_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLORS = {"better": "green", "worse": "red", "same": "dim", "": ""}


def write_report(results: Results, folder: str | Path) -> list[Path]:
    """Write ``report.html``, ``pareto.png`` and a picture for each quantized variant into the folder and return what was written.

    There is no chart where no two variants were measured for a quality and a cost. Pictures of an earlier report are removed.
    """
    folder = Path(folder)
    again = (folder / "report.html").exists()
    chart, modules = pareto_chart(results), pictures({v.name: v.modules for v in results.variants})
    files = {"report.html": render(results, chart, modules).encode(), "pareto.png": chart}
    files |= {picture_name(name): found.png for name, found in modules.items()}
    written = {folder / name: content for name, content in files.items() if content is not None}
    for path, content in written.items():
        write_atomic(path, content)
    if again:  # else the pictures there are none of ours
        for path in {folder / "pareto.png", *folder.glob("heat_maps/*.png")} - written.keys():
            path.unlink(missing_ok=True)
    return list(written)


def print_table(results: Results, console: Console) -> None:
    """The comparison on a terminal, in as many tables as its width asks for."""
    summary = summarize(results)
    for columns in _fitting(summary, console.width):
        console.print(_table(summary.names, columns), "")
    for variant in results.variants:
        if variant.error:
            console.print(f"{variant.name} failed: {variant.error}", style="red", markup=False, highlight=False)
    if summary.absent:
        console.print(f"not measured for any: {', '.join(summary.absent)}", style="dim", highlight=False)
    console.print(
        f"± is one standard error of the difference to {results.baseline.name}; dim: within {SURE:g} of them", style="dim", highlight=False
    )


def _fitting(summary: Summary, width: int) -> Iterator[list[Column]]:
    """The columns in groups that fit beside the names."""
    names, room = max(map(len, summary.names)), width
    group: list[Column] = []
    for column in summary.columns:
        needed = 3 + max(len(text) for cell in column.cells for text in (column.title, cell.text, cell.change))
        if group and needed > room:
            yield group
            group, room = [], width
        room -= needed if group else needed + names
        group.append(column)
    yield group


def _table(names: Sequence[str], columns: Sequence[Column]) -> Table:
    from rich.table import Table

    table = Table("variant", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for i, name in enumerate(names):
        table.add_row(name, *(_text(column.cells[i]) for column in columns))
    return table


def _text(cell: Cell) -> Any:
    from rich.text import Text

    if cell.value is None:
        return Text(cell.text, style="dim italic")
    return Text.assemble(cell.text, "\n" if cell.change else "", (cell.change, COLORS[cell.mood]))


# ---- the page ----------------------------------------------------------------------------------------------------------------


def render(results: Results, chart: bytes | None, modules: Mapping[str, Quantized]) -> str:
    """The page as text; ``chart`` is a PNG that goes inside, ``modules`` what is said of the quantized variants."""
    import yaml

    summary = summarize(results)
    converted = {v.name: [row for row in v.modules if not rows_of([row])] for v in results.variants}
    return filled(
        "report.html.jinja",
        results=results,
        title=results.recipe.get("about") or f"{results.baseline.name} and {len(results.variants) - 1} variants",
        summary=summary,
        highlights=list(highlights(results, summary)),
        chart=chart and f"data:image/png;base64,{base64.b64encode(chart).decode()}",
        tasks=task_grid(results),
        quantized=modules,
        converted={name: plain_grid(rows) for name, rows in converted.items() if rows},
        protocols=list(protocols(results)),
        environment=dict(flatten(results.environment)),
        recipe=yaml.safe_dump(results.recipe, sort_keys=False, allow_unicode=True, width=110) if results.recipe else "",
        sure=SURE,
        not_measured=NOT_MEASURED,
    )


def highlights(results: Results, summary: Summary) -> Iterator[tuple[str, str, Cell]]:
    """(what, variant, figure) of the extremes beside the baseline."""
    for what, title, sign in (("Smallest", "Weights", 1), ("Fastest", "Decode", -1), ("Nearest in quality", "Perplexity", 1),
                              ("Nearest in quality", "Mean accuracy", -1)):  # fmt: skip
        column = next((c for c in summary.columns if c.title == title), None)
        cells = [] if column is None else [(sign * c.value, i, c) for i, c in enumerate(column.cells) if i and c.value is not None]
        if cells:
            _, i, cell = min(cells, key=lambda c: c[:2])
            yield f"{what} ({title.lower()})", results.variants[i].name, cell


def task_grid(results: Results) -> Grid:
    """Every metric of every task and variant."""
    rows = []
    for task in dict.fromkeys(t for v in results.variants for t in v.tasks):
        for v in results.variants:
            for metric, value in v.metrics(task).items():
                error, about = stderr_of(v, task, metric), v.tasks[task]
                show = share if is_accuracy(metric) else number
                noise = ("–", None) if error is None else (show(error), error)
                counts = [(plain(about.get(k)), None) for k in ("n", "shots", "version")]
                rows.append([(task, None), (metric, None), (v.name, None), (show(value), value), noise, *counts])
    return Grid(["task", "metric", "variant", "value", "standard error", "documents", "examples in the prompt", "version"], rows)


def protocols(results: Results) -> Iterator[tuple[str, list[tuple[dict[str, Any], list[str]]]]]:
    """For each kind of figure, the protocols it was measured by and the variants that each holds for."""
    for kind in dict.fromkeys(k for v in results.variants for k in v.measured):
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for v in results.variants:
            if kind in v.measured:
                found = protocol_of(v, kind)
                groups.setdefault(json.dumps(found, default=str), (found, []))[1].append(v.name)
        yield kind, list(groups.values())


def protocol_of(variant: Variant, kind: str) -> dict[str, Any]:
    """How one kind of figure was measured, without the figures."""
    found = variant.measured[kind]
    if kind.startswith("perplexity"):
        return {**found["protocol"], "windows": len(found["windows"]), "scored tokens": found["tokens"]}
    if kind == "tasks":
        return dict(flatten(found.get("settings", {})))
    if kind == "speed":
        return {k: v for k, v in found.items() if not isinstance(v, dict)} | {"ratios": "round by round" if "ratio" in found else "none"}
    if kind == "memory":
        return {"counted": "every parameter and buffer once, tied ones too"}
    return {"what": found["what"]} if kind == "peak" else dict(flatten(found))


def flatten(data: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted keys."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value
