"""The trade-off in one picture: quality against size and against speed, with the front of the variants that no other one beats."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.eval.changes import mean_accuracy, mean_change, perplexity_change
from zoo.eval.labels import Box, place
from zoo.eval.results import Results, Variant

INK, MUTED, GRID, FRONT, BASE = "#1c2733", "#8a97a6", "#e6eaef", "#0b7a75", "#c2571a"
PANEL = (5.8, 4.3)  # inches
DPI = 160
WIDE = 5  # an axis whose values span more than this factor is logarithmic
CLEAR = 7.0  # points between a marker's centre and its label
FAR = 1.5  # times that: labels further away get a line to their point
TEXT = {"fontsize": 8.5, "color": INK, "zorder": 4}
MARK = {"markersize": 7, "capsize": 2.5, "elinewidth": 1.1, "markeredgecolor": "white", "markeredgewidth": 0.9}
LEADER = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 4}


@dataclass(frozen=True)
class Point:
    """error: one standard error of y's difference to the baseline, 0 where it is unknown."""

    name: str
    x: float
    y: float
    error: float = 0.0


@dataclass(frozen=True)
class Axis:
    """A quantity of a variant; ``less`` of it is better or not."""

    label: str
    less: bool
    value: Callable[[Results, Variant], float | None]
    error: Callable[[Results, Variant], float | None] = lambda results, variant: None


@dataclass(frozen=True)
class Panel:
    x: Axis
    y: Axis
    points: list[Point]


def pareto_chart(results: Results) -> bytes | None:
    """A PNG with one panel for each pair of a quality and a cost that two variants at least were measured for; None without any."""
    found = list(panels(results))
    return _draw(found, results.baseline.name) if found else None


def panels(results: Results) -> Iterator[Panel]:
    for y, x in itertools.product(QUALITIES, COSTS):
        there = list(_points(results, x, y))
        if len(there) > 1:
            yield Panel(x, y, there)


def front(panel: Panel) -> list[Point]:
    """The points that no other point beats on one axis without losing on the other, by x."""
    sx, sy = 1 if panel.x.less else -1, 1 if panel.y.less else -1
    best: list[Point] = []
    for p in sorted(panel.points, key=lambda p: (sx * p.x, sy * p.y)):
        if not best or sy * p.y < sy * best[-1].y:
            best.append(p)
    return sorted(best, key=lambda p: p.x)


# ---- what is drawn -----------------------------------------------------------------------------------------------------------


def _points(results: Results, x: Axis, y: Axis) -> Iterator[Point]:
    """The variants that both were measured for; what is not finite cannot be drawn."""
    for v in results.variants:
        at, height = x.value(results, v), y.value(results, v)
        if at is not None and height is not None and math.isfinite(at) and math.isfinite(height):
            yield Point(v.name, at, height, y.error(results, v) or 0.0)


def _perplexity_error(results: Results, variant: Variant) -> float | None:
    stderr = perplexity_change(variant, results.baseline).stderr
    return None if stderr is None or results.baseline.perplexity is None else stderr * results.baseline.perplexity


def _accuracy(results: Results, variant: Variant) -> float | None:
    mean = mean_accuracy(results, variant)
    return None if mean is None else 100 * mean


def _accuracy_error(results: Results, variant: Variant) -> float | None:
    stderr = mean_change(results, variant, results.baseline).stderr
    return None if stderr is None else 100 * stderr


COSTS = (
    Axis("Weights in memory, MiB", True, lambda r, v: None if v.bytes is None else v.bytes / 2**20),
    Axis("Decode, tokens a second", False, lambda r, v: v.decode_tokens_per_s),
)
QUALITIES = (
    Axis("Perplexity", True, lambda r, v: v.perplexity, _perplexity_error),
    Axis("Mean accuracy, %", False, _accuracy, _accuracy_error),
)


# ---- drawing -----------------------------------------------------------------------------------------------------------------


def _draw(found: Sequence[Panel], baseline: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(2, len(found))
    rows = math.ceil(len(found) / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.14)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), dpi=DPI, layout=layout, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    drawn = [(figure.add_subplot(rows, columns, i + 1), panel) for i, panel in enumerate(found)]
    for axes, panel in drawn:
        _draw_axes(axes, panel)
        _draw_points(axes, panel, baseline)
    _draw_legend(figure)
    canvas.draw()  # the layout is fixed only now, and labels are placed in pixels
    figure.set_layout_engine("none")
    for axes, panel in drawn:
        _draw_names(axes, panel, canvas.get_renderer())
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _draw_axes(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    sides = (("x", panel.x, [p.x for p in panel.points]), ("y", panel.y, [p.y for p in panel.points]))
    for side, quantity, values in sides:
        axis = getattr(axes, f"{side}axis")
        axes.set(**{f"{side}label": f"{quantity.label}   ({'lower' if quantity.less else 'higher'} is better)"})
        if min(values) > 0 and max(values) > WIDE * min(values):
            axes.set(**{f"{side}scale": "log"})
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(ScalarFormatter())
        axis.label.set(color=INK, fontsize=10)
    axes.margins(0.14, 0.16)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=9)


def _draw_points(axes: Any, panel: Panel, baseline: str) -> None:
    best = front(panel)
    corners = _corners(panel)
    axes.plot([x for x, _ in corners], [y for _, y in corners], color=FRONT, alpha=0.4, linewidth=1.6, zorder=2)
    for p in panel.points:
        color = BASE if p.name == baseline else FRONT if p in best else MUTED
        axes.errorbar(p.x, p.y, yerr=p.error or None, fmt="D" if p.name == baseline else "o", color=color, zorder=3, **MARK)


def _corners(panel: Panel) -> list[tuple[float, float]]:
    """The front as a staircase: between two of its points the one that is better in x holds on."""
    best = front(panel)
    path = [(best[0].x, best[0].y)]
    for before, after in itertools.pairwise(best):
        path += [(after.x, before.y) if panel.x.less else (before.x, after.y), (after.x, after.y)]
    return path


def _draw_legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    kinds = (
        ("baseline", "D", BASE),
        ("on the front", "o", FRONT),
        ("beaten by another one", "o", MUTED),
    )
    handles = [Line2D([], [], linestyle="none", marker=marker, markersize=7, color=color, label=text) for text, marker, color in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), frameon=False, fontsize=9, labelcolor=INK)


def _draw_names(axes: Any, panel: Panel, renderer: Any) -> None:
    """The variants' names, with a line to the point where a name had to move away."""
    clear = renderer.points_to_pixels(CLEAR)
    frame = axes.get_window_extent(renderer).extents
    anchors = [tuple(axes.transData.transform((p.x, p.y))) for p in panel.points]
    sizes = [_text_size(axes, p.name, renderer) for p in panel.points]
    boxes = place(anchors, sizes, frame, clear, list(_obstacles(axes, panel, 0.4 * clear)))
    for p, anchor, box in zip(panel.points, anchors, boxes, strict=True):
        middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        gap = math.hypot(*(max(box[k] - anchor[k], anchor[k] - box[k + 2], 0) for k in (0, 1)))
        line = LEADER if gap > FAR * clear else None
        axes.annotate(p.name, (p.x, p.y), middle, textcoords="figure pixels", ha="center", va="center", arrowprops=line, **TEXT)


def _obstacles(axes: Any, panel: Panel, half: float) -> Iterator[Box]:
    """The front's steps and the error bars in pixels, each as a thin box."""
    bars = [((p.x, p.y - p.error), (p.x, p.y + p.error)) for p in panel.points if p.error]
    for a, b in [*itertools.pairwise(_corners(panel)), *bars]:
        (x0, y0), (x1, y1) = axes.transData.transform([a, b])
        yield min(x0, x1) - half, min(y0, y1) - half, max(x0, x1) + half, max(y0, y1) + half


def _text_size(axes: Any, text: str, renderer: Any) -> tuple[float, float]:
    drawn = axes.text(0, 0, text, **TEXT)
    extent = drawn.get_window_extent(renderer)
    drawn.remove()
    return extent.width, extent.height
