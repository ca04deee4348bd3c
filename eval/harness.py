"""Accuracy on the tasks of lm-eval, ours among them, all by name."""

from __future__ import annotations

import difflib
import importlib.metadata
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from zoo.eval.tasks import task_manager
from zoo.model import Model

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What one task (or group of tasks) gave.

    metrics: by name; a metric that lm-eval computes behind a filter is called ``metric,filter``. stderr: of each, None where it is
    not defined. n: documents. shots: examples in the prompt. higher_is_better: by metric, None where lm-eval does not say.
    items: the value of each document in order, for paired comparisons; only metrics that are their mean.
    """

    metrics: dict[str, float]
    stderr: dict[str, float | None]
    n: int
    version: str
    shots: int | None
    higher_is_better: dict[str, bool | None]
    items: dict[str, tuple[float, ...]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results by task, and the settings that repeat the evaluation."""

    tasks: dict[str, TaskResult]
    settings: dict[str, Any]
    seconds: float


def evaluate(model: Model, tasks: str | Sequence[str], *, limit: int | float | None = None, num_fewshot: int | None = None,
             batch_size: int = 8, chat_template: bool = False, system: str | None = None, data_folder: str | Path | None = None,
             seed: int = 0) -> Evaluation:  # fmt: skip
    """Run tasks of lm-eval: its own, whose data comes from the hub or its local cache, and those of zoo.eval.tasks, which need no network.

    limit: documents of each task, or a share of them below 1. num_fewshot: examples in the prompt, None is the task's own number.
    chat_template, system: put prompts into the tokenizer's conversation format, with a system message. data_folder: for the tasks
    of ours that read local files. seed: of the choice of examples and of sampling.

    Raises ValueError, before anything runs, for unknown tasks (naming the nearest) and for a chat template that is not there.
    """
    from lm_eval.evaluator import simple_evaluate

    from zoo.eval.lm_eval_model import ZooLM

    began = time.perf_counter()
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    manager = _manager(names, data_folder)
    lm = ZooLM(model, batch_size=batch_size)
    if chat_template and not lm.tokenizer.chat_template:
        raise ValueError("chat_template: the tokenizer of this model has none; leave it off for models that were not tuned for chat")
    raw = simple_evaluate(lm, tasks=list(names), num_fewshot=num_fewshot, limit=limit, task_manager=manager, system_instruction=system,
                          apply_chat_template=chat_template, random_seed=seed, numpy_random_seed=seed, torch_random_seed=seed,
                          fewshot_random_seed=seed)  # fmt: skip
    settings = {"tasks": names, "limit": limit, "num_fewshot": num_fewshot, "batch_size": batch_size, "chat_template": chat_template,
                "system": system, "seed": seed, "max_length": lm.max_length, "lm_eval": importlib.metadata.version("lm_eval")}  # fmt: skip
    if lm.notes:
        settings["notes"] = lm.notes
    return Evaluation(tasks=_results(raw or {}), settings=settings, seconds=time.perf_counter() - began)


def check_tasks(names: Sequence[str], data_folder: str | Path | None = None) -> None:
    """Raise ValueError, with the nearest, for names that no task has."""
    _manager(names, data_folder)


def _manager(names: Sequence[str], data_folder: str | Path | None) -> TaskManager:
    """Our tasks alone where they suffice: lm-eval's index takes seconds to read."""
    if not names:
        raise ValueError("no tasks were named")
    own = task_manager(data_folder, builtin=False)
    if set(names) <= set(own.all_tasks):
        return own
    manager = task_manager(data_folder)
    if unknown := [_unknown(name, manager.all_tasks) for name in names if name not in manager.task_index]:
        raise ValueError("\n".join(unknown))
    return manager


def _unknown(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, 5)
    return f"no task named {name!r}; " + (f"the nearest are {', '.join(close)}" if close else "`lm_eval ls tasks` lists all")


def _results(raw: Mapping[str, Any]) -> dict[str, TaskResult]:
    return {name: _result(name, values, raw) for name, values in (raw.get("results", {}) | raw.get("groups", {})).items()}


def _result(name: str, values: Mapping[str, Any], raw: Mapping[str, Any]) -> TaskResult:
    metrics = {_metric(k): float(v) for k, v in values.items() if "," in k and "_stderr," not in k and isinstance(v, (int, float))}
    errors = {_metric(k.replace("_stderr,", ",")): v for k, v in values.items() if "_stderr," in k}
    higher = raw["higher_is_better"].get(name, {})
    return TaskResult(
        metrics=metrics,
        stderr={m: float(errors[m]) if isinstance(errors.get(m), (int, float)) else None for m in metrics},
        n=values["sample_len"],
        version=str(raw["versions"].get(name)),
        shots=raw["n-shot"].get(name),
        higher_is_better={m: higher.get(m.partition(",")[0]) for m in metrics},
        items=_items(raw["samples"].get(name, ()), metrics),
    )


def _metric(key: str) -> str:
    """``acc,none`` is ``acc``."""
    return key.removesuffix(",none")


def _items(samples: Iterable[Mapping[str, Any]], metrics: Mapping[str, float]) -> dict[str, tuple[float, ...]]:
    """Each document's value of the metrics that are a plain mean of them."""
    found: dict[str, tuple[float, ...]] = {}
    for name, value in metrics.items():
        metric, _, chosen = name.partition(",")
        values = [s.get(metric) for s in samples if s["filter"] == (chosen or "none")]
        numbers = tuple(float(v) for v in values if isinstance(v, (bool, int, float)))
        if numbers and len(numbers) == len(values) and math.isclose(fmean(numbers), value, abs_tol=1e-9):
            found[name] = numbers
    return found


def paired_difference(items: Sequence[float], baseline: Sequence[float]) -> tuple[float, float | None]:
    """Mean difference over the same documents and its standard error, which is smaller than that of two separate runs."""
    differences = [a - b for a, b in zip(items, baseline, strict=True)]
    return fmean(differences), stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
