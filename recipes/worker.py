"""One variant of a recipe: load, edit, quantize, measure, write. Run as ``python -m zoo.recipes.worker ORDER.json``."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.components.spec import dump
from zoo.declare import spec as read_spec
from zoo.eval import disk_bytes, evaluate, memory, peak_memory, perplexity, speed
from zoo.eval.environment import describe_environment
from zoo.eval.results import Results, Variant, save_results, variant
from zoo.loading import load
from zoo.model import Model
from zoo.quantize import quantize
from zoo.recipes.recipe import Measure, Recipe
from zoo.recipes.runner import read_order


@dataclass
class Clock:
    """Seconds of each stage, announced as it begins."""

    label: str
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        print(f"  {self.label}: {name} ...", file=sys.stderr, flush=True)
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


def run_variant(recipe: Recipe, index: int, out: Path) -> Variant:
    """Everything that the recipe asks of one variant."""
    wanted = recipe.variants[index]
    clock = Clock(wanted.label)
    with clock.stage("load"):
        model = load(wanted.model or recipe.model, dtype=wanted.dtype or recipe.dtype, device=recipe.device, override=wanted.override)
    rows: list[dict[str, Any]] = []
    if wanted.quantizer is not None:
        with clock.stage("quantize"):
            c = recipe.calibration
            report = quantize(model, wanted.quantizer, calibration=c.text and Path(c.text), samples=c.samples, length=c.length,
                              seed=c.seed, rules=wanted.rules, work_dir=out / "work" / wanted.label)  # fmt: skip
            rows = [dataclasses.asdict(row) for row in report.rows]
    baseline = read_spec(recipe.variants[0].model or recipe.model, *recipe.variants[0].override)
    figures = measure(model, recipe.measure, clock, out / "models" / wanted.label)
    return variant(wanted.label, spec=model.spec, baseline=baseline if index else None, modules=rows, seconds=clock.seconds, **figures)


def measure(model: Model, wanted: Measure, clock: Clock, folder: Path) -> dict[str, Any]:
    """The figures of a model by the names that ``zoo.eval.results.variant`` takes."""
    found: dict[str, Any] = {"memory": memory(model)}
    with peak_memory(model.device) as peak:
        if (p := wanted.perplexity) is not None:
            with clock.stage("perplexity"):
                found["perplexity"] = perplexity(model, p.text and Path(p.text), context=p.context, stride=p.stride, limit=p.limit)
        if (t := wanted.tasks) is not None:
            with clock.stage("tasks"):
                found["evaluation"] = evaluate(
                    model, t.names, limit=t.limit, num_fewshot=t.shots, batch_size=t.batch_size, data_folder=t.data
                )
        if (s := wanted.speed) is not None:
            with clock.stage("speed"):
                found["speed"] = speed(model, prompt_tokens=s.prompt_tokens, new_tokens=s.new_tokens, batch_sizes=s.batch_sizes,
                                       repeats=s.repeats, warmup=s.warmup)[0]  # fmt: skip
    found["peak"] = peak
    if wanted.save:
        from zoo.saving import save

        with clock.stage("save"):
            save(model, folder, overwrite=True)
            found["disk_bytes"] = disk_bytes(folder)
    return found


def main(order: str) -> int:
    recipe, index, out, result = read_order(Path(order))
    label = recipe.variants[index].label
    try:
        done = run_variant(recipe, index, out)
    except (ValueError, OSError, RuntimeError, MemoryError) as e:
        print(f"  {label}: {type(e).__name__}: {e}", file=sys.stderr)
        done = Variant(name=label, error=f"{type(e).__name__}: {e}")
    save_results(Results(environment=describe_environment(), variants=[done], recipe=dump(recipe)), result)
    return 1 if done.error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
