"""Differences between a variant and the baseline, with their noise; figures that were measured differently are never subtracted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zoo.eval.harness import paired_difference
from zoo.eval.held_out import Perplexity
from zoo.eval.results import Results, Variant

SURE = 2.0  # standard errors from which a difference counts as one
MAIN_METRICS = ("acc", "exact_match", "acc_norm", "f1")  # which metric stands for a task, best first
ACCURACIES = ("acc", "exact_match", "f1", "em")  # metrics that are a share of something, shown in percent
TASK_CONDITIONS = ("limit", "num_fewshot", "chat_template", "system", "seed", "max_length")
SPEED_CONDITIONS = ("batch_size", "prompt_tokens", "new_tokens", "device", "threads")


@dataclass(frozen=True)
class Change:
    """value: the difference, or the ratio of speeds. low, high: where it lies, given the noise; None where that is unknown.
    how: how it was found. refused: why there is none.
    """

    value: float = math.nan
    low: float | None = None
    high: float | None = None
    how: str = ""
    refused: str = ""

    @classmethod
    def of(cls, value: float, stderr: float | None, how: str) -> Change:
        """A difference with its standard error."""
        if not math.isfinite(value):
            return cls(refused=f"the difference is {value}")
        return cls(value, how=f"{how}, noise unknown") if stderr is None else cls(value, value - SURE * stderr, value + SURE * stderr, how)

    @property
    def stderr(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / (2 * SURE)

    def sign(self, nothing: float = 0.0) -> int | None:
        """1 above ``nothing``, -1 below, 0 where the noise covers it, None where the noise is unknown."""
        if self.low is None or self.high is None:
            return None
        return 1 if self.low > nothing else -1 if self.high < nothing else 0


# ---- tasks -------------------------------------------------------------------------------------------------------------------


def main_metrics(results: Results) -> list[tuple[str, str]]:
    """(task, its main metric) for every task that some variant was measured on, in order."""
    found: dict[str, str] = {}
    for variant in results.variants:
        for task in variant.tasks:
            metrics = variant.metrics(task)
            ranked = [m for wanted in MAIN_METRICS for m in metrics if m.partition(",")[0] == wanted]
            if metrics:
                found.setdefault(task, (ranked or list(metrics))[0])
    return list(found.items())


def is_accuracy(metric: str) -> bool:
    return metric.startswith(ACCURACIES)


def accuracy_tasks(results: Results) -> list[tuple[str, str]]:
    return [(task, metric) for task, metric in main_metrics(results) if is_accuracy(metric)]


def mean_accuracy(results: Results, variant: Variant) -> float | None:
    """Mean of the main accuracies over all tasks of the comparison; None where one is missing."""
    tasks = accuracy_tasks(results)
    known = [x for task, metric in tasks if (x := variant.metrics(task).get(metric)) is not None]
    return sum(known) / len(known) if known and len(known) == len(tasks) else None


def task_change(variant: Variant, baseline: Variant, task: str, metric: str) -> Change:
    """Paired by document where the documents' values were kept, else from the standard errors of both."""
    here, there = variant.metrics(task).get(metric), baseline.metrics(task).get(metric)
    if here is None or there is None:
        return Change(refused="one of the two was not measured")
    if differ := _differing(_task_conditions(variant, task), _task_conditions(baseline, task)):
        return Change(refused=f"measured differently: {differ}")
    ours, theirs = _items(variant, task, metric), _items(baseline, task, metric)
    if ours and theirs and len(ours) == len(theirs):
        return Change.of(*paired_difference(ours, theirs), how=f"paired over {len(ours)} documents")
    errors = [stderr_of(v, task, metric) for v in (variant, baseline)]
    known = [e for e in errors if e is not None]
    return Change.of(here - there, math.hypot(*known) if len(known) == 2 else None, how="from the standard errors of both, not paired")


def mean_change(results: Results, variant: Variant, baseline: Variant) -> Change:
    """Of the mean accuracy; the tasks' noises are independent."""
    changes = [task_change(variant, baseline, task, metric) for task, metric in accuracy_tasks(results)]
    if refused := next((c.refused for c in changes if c.refused), ""):
        return Change(refused=refused)
    errors = [c.stderr for c in changes if c.stderr is not None]
    stderr = math.hypot(*errors) / len(changes) if len(errors) == len(changes) else None
    return Change.of(sum(c.value for c in changes) / len(changes), stderr, how=f"over {len(changes)} tasks, each {changes[0].how}")


def stderr_of(variant: Variant, task: str, metric: str) -> float | None:
    return variant.tasks[task].get("stderr", {}).get(metric)


def _items(variant: Variant, task: str, metric: str) -> list[float] | None:
    return variant.measured.get("tasks", {}).get("items", {}).get(task, {}).get(metric)


def _task_conditions(variant: Variant, task: str) -> dict[str, Any]:
    settings = variant.measured.get("tasks", {}).get("settings", {})
    return {k: settings.get(k) for k in TASK_CONDITIONS} | {k: variant.tasks[task].get(k) for k in ("n", "version", "shots")}


def _differing(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {there[k]!r} against {here[k]!r}" for k in here if here[k] != there[k])


# ---- perplexity and speed ----------------------------------------------------------------------------------------------------


def perplexity_change(variant: Variant, baseline: Variant, kind: str = "perplexity") -> Change:
    """Relative increase, paired by window. Refused without both protocols, or where they differ. kind: key of ``measured``."""
    pair = [v.measured.get(kind) for v in (variant, baseline)]
    here, there = [Perplexity.from_dict(p) if p else None for p in pair]
    if here is None or there is None:
        return Change(refused="the protocol of one of the two was not recorded")
    try:
        change = here.versus(there)
    except ValueError as e:
        return Change(refused=str(e))
    stderr = None if change.stderr is None else change.ratio * change.stderr
    return Change.of(change.ratio - 1, stderr, how=f"paired over {len(here.windows)} windows")


def speed_change(variant: Variant, baseline: Variant, kind: Literal["decode", "prefill"]) -> Change:
    """Ratio of throughputs: round by round where the two ran side by side, else of the medians of separate runs."""
    here, there = variant.measured.get("speed", {}), baseline.measured.get("speed", {})
    ratio = here.get("ratio", {})
    if kind in ratio and ratio.get("baseline") == baseline.name:
        return Change(ratio[kind]["median"], ratio[kind]["low"], ratio[kind]["high"], f"round by round, {here['repeats']} rounds")
    ours, theirs = getattr(variant, f"{kind}_tokens_per_s"), getattr(baseline, f"{kind}_tokens_per_s")
    if not ours or not theirs:
        return Change(refused="one of the two was not measured")
    conditions = [{k: speed.get(k) for k in SPEED_CONDITIONS} for speed in (here, there)]
    if not here or not there or conditions[0] != conditions[1]:
        return Change(refused=f"measured differently: {_differing(*conditions)}" if here and there else "the conditions were not recorded")
    return Change(ours / theirs, how="medians of separate runs, noise unknown")
