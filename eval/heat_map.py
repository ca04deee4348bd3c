"""What each module of a quantized model lost, as a picture: a row for each kind of module, a column for each layer."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from zoo.eval.pareto import DPI, INK, MUTED, WIDE
from zoo.quantize.error_map import ErrorMap, Kind

SCALE = ("#fdf4ec", "#f3b98f", "#c2571a", "#541d05")  # from the least error to the greatest
NONE = "#e6eaef"  # layers that have no such module
TITLES = {"output_error": "Relative error of the outputs on the calibration data, ‖(W − Q) X‖ / ‖W X‖",
          "weight_error": "Relative error of the weights, ‖W − Q‖ / ‖W‖ (no data was used)"}  # fmt: skip
CELL, NARROW = (0.62, 0.3), (0.2, 0.3)  # inches of a cell with its figure in it, and of one without
WRITTEN = 16  # layers up to which figures stand in the cells
WIDTH = (5.0, 16.0)  # inches that the cells may take together
AROUND = (3.2, 1.5)  # inches for labels and scale
TICKS = 24  # layers that are numbered at most

Line = tuple[str, Sequence[float | None]]
Span = tuple[float, float]


def heat_map(errors: ErrorMap, span: Span | None = None) -> bytes | None:
    """A PNG. span: the errors that the colours go from and to, the map's own by default; pictures of one span can be compared.

    None where no module of a layer has an error above 0.
    """
    span = span or errors.span()
    return None if span is None or errors.span() is None else _draw(errors, lines(errors), span)


def lines(errors: ErrorMap) -> list[Line]:
    """The rows of the picture: a kind of module, or the mean and the worst of several that a layer has of a kind."""
    return [line for row in errors.rows for line in _lines(row)]


def _lines(row: Kind) -> list[Line]:
    if row.modules == 1:
        return [(row.kind, row.mean)]
    return [(f"{row.kind}  mean", row.mean), (f"{row.kind}  worst", row.worst)]


def _draw(errors: ErrorMap, rows: Sequence[Line], span: Span) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written = errors.layers <= WRITTEN
    across, down = CELL if written else NARROW
    width = min(max(across * errors.layers, WIDTH[0]), WIDTH[1])
    figure = Figure(figsize=(AROUND[0] + width, AROUND[1] + down * len(rows)), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    mesh = _draw_cells(axes, rows, span)
    if written:
        _draw_figures(axes, rows, mesh)
    _draw_axes(axes, errors, rows)
    _draw_scale(figure, axes, mesh)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _draw_cells(axes: Any, rows: Sequence[Line], span: Span) -> Any:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    low, high = span
    norm = LogNorm(low, high) if high > WIDE * low else Normalize(0, high)
    values = np.ma.masked_invalid([[math.nan if v is None else max(v, low) for v in row] for _, row in rows])
    colors = LinearSegmentedColormap.from_list("error", SCALE)
    axes.set_facecolor(NONE)
    return axes.pcolormesh(values, cmap=colors, norm=norm, edgecolors="white", linewidth=0.8)


def _draw_figures(axes: Any, rows: Sequence[Line], mesh: Any) -> None:
    for y, (_, row) in enumerate(rows):
        for x, value in enumerate(row):
            if value is not None:
                dark = float(mesh.norm(value)) > 0.55
                axes.text(x + 0.5, y + 0.5, short(value), ha="center", va="center", fontsize=7.5, color="white" if dark else INK)


def _draw_axes(axes: Any, errors: ErrorMap, rows: Sequence[Line]) -> None:
    step = math.ceil(errors.layers / TICKS)
    shown = range(0, errors.layers, step)
    axes.set_xticks([x + 0.5 for x in shown], [str(x) for x in shown])
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [name for name, _ in rows])
    axes.invert_yaxis()
    axes.tick_params(colors=INK, labelsize=8.5, length=0)
    axes.spines[:].set_visible(False)
    outside = ", ".join(f"{path} {short(value)}" for path, value in errors.outside.items() if value is not None)
    axes.set_xlabel("layer" + (f"\noutside of the layers: {outside}" if outside else ""), color=INK, fontsize=9)
    axes.set_title(TITLES[errors.measure], color=INK, fontsize=9.5, loc="left", pad=10)


def _draw_scale(figure: Any, axes: Any, mesh: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    bar = figure.colorbar(mesh, ax=axes, pad=0.015, fraction=0.05, aspect=18)
    logarithmic = type(mesh.norm).__name__ == "LogNorm"
    bar.locator = LogLocator(subs=(1, 2, 5)) if logarithmic else MaxNLocator(5)
    bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")
    bar.update_ticks()
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(colors=INK, labelsize=8, length=2, color=MUTED)
    bar.outline.set_visible(False)


def short(value: float) -> str:
    """Two significant figures, as few characters as may be."""
    return f"{value:.1e}".replace("e-0", "e-") if 0 < value < 0.001 else f"{value:#.2g}".removesuffix(".")
