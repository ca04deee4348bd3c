"""The comparison table: every variant beside the baseline. What was not measured says so, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from zoo.eval.changes import (
    SURE,
    Change,
    accuracy_tasks,
    is_accuracy,
    main_metrics,
    mean_accuracy,
    mean_change,
    perplexity_change,
    speed_change,
    stderr_of,
    task_change,
)
from zoo.eval.results import Results, Variant

NOT_MEASURED = "not measured"
NOTHING = 0.005  # relative differences of sizes below it are none


@dataclass(frozen=True)
class Cell:
    """text: the figure; value: to sort by, None where there is none. change: against the baseline; note: how sure, and how compared.
    mood: ``better`` or ``worse`` where the change exceeds its noise, ``same`` where it does not, "" where that is unknown.
    """

    text: str
    value: float | None = None
    change: str = ""
    note: str = ""
    mood: Literal["", "better", "worse", "same"] = ""


@dataclass(frozen=True)
class Column:
    """cells: one a variant, in the results' order."""

    title: str
    about: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Summary:
    """absent: titles of the columns that no variant was measured for."""

    names: list[str]
    columns: list[Column]
    absent: list[str]


@dataclass(frozen=True)
class _Style:
    """How differences are written: times ``scale``, in ``form``."""

    scale: float
    form: str
    unit: str = ""


POINTS, PERCENT, PLAIN = _Style(100, ".1f"), _Style(100, ".2f", " %"), _Style(1, ".3g")


def summarize(results: Results) -> Summary:
    """Only the columns that some variant was measured for."""
    every = list(_columns(results))
    there = [c for c in every if any(cell.value is not None for cell in c.cells)]
    return Summary([v.name for v in results.variants], there, [c.title for c in every if c not in there])


def _columns(results: Results) -> Iterator[Column]:
    base = results.baseline

    def column(title: str, about: str, cell: Callable[[Variant], Cell]) -> Column:
        return Column(title, about, tuple(cell(v) for v in results.variants))

    yield column("Bits / weight", "matrices in the layers as saved, with scales", lambda v: _bits(v.bits_per_weight))
    yield column("Weights", "all parameters and buffers in memory", lambda v: _size(v.bytes, base.bytes))
    yield column("On disk", "all files of the saved model", lambda v: _size(v.disk_bytes, base.disk_bytes))
    yield column("Perplexity", "lower is better", lambda v: _perplexity(v, base, v.perplexity, "perplexity"))
    for n in _keys(v.perplexities for v in results.variants):
        further = partial(_further_perplexity, base=base, context=n)
        yield column(f"Perplexity at {n}", f"windows of {n} tokens", further)
    if _caches_differ(results):
        per_token = base.cache_bytes_per_token
        yield column("KV / token", "one more token in all layers, while it is kept", lambda v: _size(v.cache_bytes_per_token, per_token))
        for n in _keys(v.cache_bytes for v in results.variants):
            yield column(f"KV at {n}", f"the cache of one row after {n} tokens", partial(_cache, base=base, context=n))
    for task, metric in main_metrics(results):
        yield column(f"{task} {metric}", "± is one standard error", lambda v, t=task, m=metric: _task(v, base, t, m))
    if len(accuracy_tasks(results)) > 1:
        yield column("Mean accuracy", "of the tasks' main metrics", lambda v: _mean(results, v))
    yield column("Decode", "tokens a second, step by step", lambda v: _speed(v, base, "decode"))
    yield column("Prefill", "prompt tokens a second", lambda v: _speed(v, base, "prefill"))
    yield column("First token", "from the prompt to the first token", lambda v: _seconds(v.time_to_first_token_s))
    yield column("Peak memory", "highest while it was measured", lambda v: _size(v.peak_bytes, base.peak_bytes))


def _caches_differ(results: Results) -> bool:
    """Whether there is anything to compare; variants that only quantize weights keep the same keys and values."""
    measured = [v for v in results.variants if v.cache_bytes_per_token is not None]
    return any((v.cache_bytes_per_token, v.cache_bytes) != (measured[0].cache_bytes_per_token, measured[0].cache_bytes) for v in measured)


def _keys(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of several mappings, numbers in their order."""
    return sorted({key for group in groups for key in group}, key=int)


# ---- cells -------------------------------------------------------------------------------------------------------------------


def _bits(value: float | None) -> Cell:
    return Cell(NOT_MEASURED) if value is None else Cell(f"{value:.2f}", value)


def _seconds(value: float | None) -> Cell:
    return Cell(NOT_MEASURED) if value is None else Cell(f"{number(value, 3)} s", value)


def _size(value: int | None, base: int | None) -> Cell:
    if value is None:
        return Cell(NOT_MEASURED)
    note = f"{value:,} bytes"
    if not base or value == base:
        return Cell(size(value), value, note=note)
    if abs(value / base - 1) < NOTHING:
        return Cell(size(value), value, "1.00×", note, "same")
    change = f"{base / value:.2f}× smaller" if value < base else f"{value / base:.2f}× larger"
    return Cell(size(value), value, change, note, "better" if value < base else "worse")


def _perplexity(variant: Variant, base: Variant, value: float | None, kind: str) -> Cell:
    if value is None:
        return Cell(NOT_MEASURED)
    text = number(value)
    if variant is base:
        return Cell(text, value)
    return _changed(text, value, perplexity_change(variant, base, kind), PERCENT, better=-1)


def _further_perplexity(variant: Variant, base: Variant, context: str) -> Cell:
    return _perplexity(variant, base, variant.perplexities.get(context), f"perplexity at {context}")


def _cache(variant: Variant, base: Variant, context: str) -> Cell:
    return _size(variant.cache_bytes.get(context), base.cache_bytes.get(context))


def _task(variant: Variant, base: Variant, task: str, metric: str) -> Cell:
    value = variant.metrics(task).get(metric)
    if value is None:
        return Cell(NOT_MEASURED)
    style = POINTS if is_accuracy(metric) else PLAIN
    text = share(value) if is_accuracy(metric) else number(value)
    if variant is base:
        error = stderr_of(variant, task, metric)
        return Cell(
            text, value, "" if error is None else f"± {style.scale * error:{style.form}}", f"{variant.tasks[task].get('n')} documents"
        )
    higher = variant.tasks[task].get("higher_is_better", {}).get(metric)
    return _changed(text, value, task_change(variant, base, task, metric), style, better=-1 if higher is False else 1)


def _mean(results: Results, variant: Variant) -> Cell:
    value = mean_accuracy(results, variant)
    if value is None:
        return Cell(NOT_MEASURED)
    if variant is results.baseline:
        return Cell(share(value), value)
    return _changed(share(value), value, mean_change(results, variant, results.baseline), POINTS, better=1)


def _changed(text: str, value: float, change: Change, style: _Style, better: int) -> Cell:
    """A figure with its difference; ``better`` is the sign of an improvement."""
    if change.refused:
        return Cell(text, value, note=f"not compared: {change.refused}")
    shown = f"{style.scale * change.value:+{style.form}}".replace("-", "−")
    sign = change.sign()
    if sign is None or change.stderr is None:
        return Cell(text, value, shown + style.unit, change.how)
    noise = f" ± {style.scale * change.stderr:{style.form}}"
    where = "within" if sign == 0 else "beyond"
    note = f"{where} {SURE:g} standard errors of the baseline, {change.how}"
    return Cell(text, value, shown + noise + style.unit, note, "same" if sign == 0 else "better" if sign == better else "worse")


def _speed(variant: Variant, base: Variant, kind: Literal["decode", "prefill"]) -> Cell:
    value = variant.decode_tokens_per_s if kind == "decode" else variant.prefill_tokens_per_s
    if value is None:
        return Cell(NOT_MEASURED)
    text = f"{number(value, 3)} tok/s"
    if variant is base:
        spread = variant.measured.get("speed", {}).get(f"{kind}_tokens_per_s")
        return Cell(text, value, note=f"{number(spread['low'], 3)} to {number(spread['high'], 3)}" if spread else "")
    change = speed_change(variant, base, kind)
    if change.refused:
        return Cell(text, value, note=f"not compared: {change.refused}")
    if change.low is None or change.high is None:
        return Cell(text, value, f"{change.value:.2f}×", change.how)
    sign = change.sign(nothing=1.0)
    mood = "same" if sign == 0 else "better" if sign == 1 else "worse"
    return Cell(text, value, f"{change.value:.2f}×", f"{change.low:.2f} to {change.high:.2f}, {change.how}", mood)


# ---- numbers in words --------------------------------------------------------------------------------------------------------


def size(count: float) -> str:
    """Bytes in binary units with three figures."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = min(len(units) - 1, max(0, int(math.log2(count) // 10))) if count >= 1 else 0
    value = count / 1024**power
    return f"{value:.0f} {units[power]}" if power == 0 or value >= 100 else f"{value:.3g} {units[power]}"


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def number(value: float, figures: int = 4) -> str:
    """So many significant figures, thousands separated."""
    if not math.isfinite(value):
        return "undefined" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:#.{figures}g}".removesuffix(".")
