"""Runs recipes: each variant in a process of its own, finished ones kept, everything in one report.

A process per variant makes its peak memory its own and lets the rest go on when one fails. A finished variant is a file under
``DIR/variants`` named by the hash of all that it depends on, so a killed run continues and a changed recipe runs only what changed.
The folder of a variant has the name of its label alone, so it holds a record of which of them it was made for.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from zoo.components.spec import dump, load
from zoo.eval.environment import describe_environment
from zoo.eval.results import Results, ResultsError, Variant, load_results, save_results, write_atomic
from zoo.recipes.recipe import Recipe
from zoo.recipes.recipe import Variant as VariantSpec
from zoo.saving import check_folder

WRITTEN = ("results.json", "report.html", "pareto.png")
PRELOADED = ("zoo.recipes.worker", "lm_eval.evaluator", "transformers.models.auto.tokenization_auto")  # seconds each to import
RECORD = ".made.json"  # hidden, so that it is not published with the model


def run(recipe: Recipe, out: str | Path, *, console: Console | None = None, fresh: bool = False) -> Results:
    """Run every variant that is not finished and write ``results.json``, ``report.html`` and ``pareto.png`` into ``out``.

    fresh: make and measure every variant anew. The results file is written after each variant; a variant that fails has ``error`` set
    and the others go on. KeyboardInterrupt stops at once; finished variants stay. Raises FileExistsError, before anything runs, where
    files would be replaced that are of no earlier run, and ValueError for tasks that are not there.
    """
    from zoo.eval.report import print_table, write_report

    console, out = console or Console(), Path(out)
    check_out(recipe, out)
    if recipe.measure.tasks is not None:
        from zoo.eval.harness import check_tasks  # takes seconds to import

        check_tasks(recipe.measure.tasks.names, recipe.measure.tasks.data)
    out.mkdir(parents=True, exist_ok=True)
    done: list[Variant] = []
    for i, variant in enumerate(recipe.variants):
        order = Order(recipe, i, out, out / "variants" / f"{variant.label}-{key(recipe, i)}.json", "measure")
        if fresh:
            order.forget()
        kept = _kept(order)
        console.print(f"[{i + 1}/{len(recipe.variants)}] {variant.label}{': kept from an earlier run' if kept else ''}", highlight=False)
        done.append(kept or _run_one(order))
        results = Results(environment=describe_environment(), variants=done, protocol=dump(recipe.measure), recipe=dump(recipe))
        save_results(results, out / "results.json")
    written = [out / "results.json", *write_report(results, out)]
    print_table(results, console)
    console.print(f"wrote {', '.join(map(str, written))}", highlight=False)
    return results


def check_out(recipe: Recipe, out: Path) -> None:
    """Raise FileExistsError if a run into ``out`` would replace what no run has written."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file; results need a folder, give another name")
    foreign = [name for name in WRITTEN if (out / name).exists()]
    if foreign and not (out / "variants").is_dir():
        raise FileExistsError(f"{out} holds {', '.join(foreign)}, but no run of a recipe wrote it (there is no variants folder); "
                              "give another folder")  # fmt: skip
    for i in range(len(recipe.variants)):
        order = Order(recipe, i, out, out, "make")
        if order.needed:
            check_folder(order.folder, overwrite=True)


def key(recipe: Recipe, index: int) -> str:
    """Hash of everything that a variant's figures depend on: itself, the model's and texts' files, how it is measured, our version."""
    variant, measure, here = recipe.variants[index], recipe.measure, describe_environment()
    texts = [recipe.calibration.text, measure.perplexity and measure.perplexity.text, measure.tasks and measure.tasks.data,
             measure.images and measure.images.folder]  # fmt: skip
    content = {
        "variant": dump(variant),
        "baseline": dump(recipe.variants[0]) if index else None,
        "files": [[name, _fingerprint(name)] for name in (variant.model or recipe.model, *texts) if name],
        "rest": [recipe.dtype, recipe.device, dump(recipe.calibration), dump(measure)],
        "software": [here["zoo"], here["revision"], here["libraries"], here["threads"]],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _fingerprint(reference: str) -> Any:
    """Path, size and time of each file of a model, a text or a folder of data; a model of the hub is named by its commit's folder."""
    from zoo.checkpoint import is_hub_id, open_checkpoint

    path = Path(reference).expanduser()
    if (
        reference.startswith("package:")
        or path.suffix == ".gguf"
        or (path / "config.json").exists()
        or ((is_hub_id(reference) or "#" in reference) and not path.exists())
    ):
        return open_checkpoint(reference).identity()
    found = sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []
    return [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in found if p.is_file()]


def _finished(path: Path) -> Variant | None:
    """The variant that an earlier run left at ``path``, None where there is none or it failed."""
    if not path.is_file():
        return None
    try:
        variant = load_results(path).variants[0]
    except ResultsError:  # damaged, so it is run again
        return None
    return None if variant.error else variant


def _kept(order: Order) -> Variant | None:
    """What an earlier run found, None where there is nothing or where the folder that was to be kept with it is another one's."""
    intact = not order.recipe.measure.save or order.made() is not None
    return _finished(order.result) if intact else None


@dataclass(frozen=True)
class Order:
    """What a worker is told. step: ``make`` or ``measure``. result: where the variant's figures go."""

    recipe: Recipe
    index: int
    out: Path
    result: Path
    step: str

    @property
    def variant(self) -> VariantSpec:
        return self.recipe.variants[self.index]

    @property
    def needed(self) -> bool:
        """Whether the variant is written to its folder before it is measured."""
        v = self.variant
        return bool(v.quantizer or v.convert or v.calibrated_cache or self.recipe.measure.save)

    @property
    def reference(self) -> str:
        return self.variant.model or self.recipe.model

    @property
    def dtype(self) -> str:
        return self.variant.dtype or self.recipe.dtype

    @property
    def folder(self) -> Path:
        """Where the variant is saved."""
        return self.out / "models" / self.variant.label

    @property
    def work(self) -> Path:
        """Where an interrupted quantization is taken up again."""
        return self.out / "work" / self.result.stem

    @property
    def record(self) -> Path:
        """What ``make`` leaves for ``measure``. It lies in the folder, so whatever replaces the folder takes it away."""
        return self.folder / RECORD

    def made(self) -> dict[str, Any] | None:
        """The record, None where the folder is not complete or was made for another variant."""
        if not self.record.is_file():
            return None
        try:
            found = json.loads(self.record.read_text(encoding="utf-8"))
        except ValueError:  # damaged, so the folder is made again
            return None
        return found if found["made_for"] == self.result.stem else None

    def leave(self, found: dict[str, Any]) -> None:
        """Record that the folder is complete, with what ``made`` is to give back."""
        write_atomic(self.record, json.dumps(found | {"made_for": self.result.stem}).encode())

    def forget(self) -> None:
        """Remove all by which an earlier run would be taken up."""
        self.result.unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
        if self.needed:
            self.record.unlink(missing_ok=True)

    def write(self, path: Path) -> None:
        data = {"recipe": dump(self.recipe), "index": self.index, "out": str(self.out), "result": str(self.result), "step": self.step}
        write_atomic(path, json.dumps(data).encode())

    @classmethod
    def read(cls, path: Path) -> Order:
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(load(Recipe, data["recipe"]), data["index"], Path(data["out"]), Path(data["result"]), data["step"])


def _run_one(order: Order) -> Variant:
    """Run one variant in child processes, which share the terminal, and read what they wrote."""
    order.result.parent.mkdir(parents=True, exist_ok=True)
    order.result.unlink(missing_ok=True)  # of a run that failed, or whose folder is gone
    began, code = time.perf_counter(), 0
    if order.needed and order.made() is None:
        code = _work(replace(order, step="make"))
    code = code or _work(order)
    found = _finished(order.result)
    if found:
        if order.needed and not order.recipe.measure.save:
            shutil.rmtree(order.folder, ignore_errors=True)
        return found
    why = _error(order.result) or f"the process ended with status {code}; see the messages above"
    return Variant(name=order.variant.label, error=why, seconds={"total": time.perf_counter() - began})


def _work(order: Order) -> int:
    """One step in a process of its own; its exit status."""
    path = order.result.with_suffix(".order.json")
    order.write(path)
    try:
        child = _processes().Process(target=_step, args=(str(path),))
        child.start()
        child.join()
        return child.exitcode or 0
    finally:
        path.unlink(missing_ok=True)


def _processes() -> Any:
    """Where processes begin: forked from one that has the imports behind it and has computed nothing, where the system has that."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _step(path: str) -> None:
    from zoo.recipes import worker

    raise SystemExit(worker.main(path))


def _error(path: Path) -> str | None:
    if not path.is_file():
        return None
    return load_results(path).variants[0].error


def with_only(recipe: Recipe, labels: list[str]) -> Recipe:
    """The recipe with the baseline and the named variants. Raises ValueError with the nearest name."""
    from zoo.components.registry import nearest

    known = [v.label for v in recipe.variants]
    for label in labels:
        if label not in known:
            raise ValueError(f"no variant {label!r} in the recipe{nearest(label, known)}")
    kept = tuple(v for i, v in enumerate(recipe.variants) if i == 0 or v.label in labels)
    return replace(recipe, variants=kept)
