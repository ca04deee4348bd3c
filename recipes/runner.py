"""Runs recipes: each variant in a process of its own, finished ones kept, everything in one report.

A process per variant makes its peak memory its own and lets the rest go on when one fails. A finished variant is a file under
``DIR/variants`` named by the hash of all that it depends on, so a killed run continues and a changed recipe runs only what changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from zoo.components.spec import dump, load
from zoo.eval.environment import describe_environment
from zoo.eval.results import Results, Variant, check_results, save_results, write_atomic
from zoo.recipes.recipe import Recipe


def run(recipe: Recipe, out: str | Path, *, console: Console | None = None, fresh: bool = False) -> Results:
    """Run every variant that is not finished and write ``results.json``, ``report.html`` and ``pareto.png`` into ``out``.

    fresh: run finished variants again. The results file is written after each variant; a variant that fails has ``error`` set and the
    others go on. KeyboardInterrupt stops at once; finished variants stay.
    """
    from zoo.eval.report import print_table, write_report

    console, out = console or Console(), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    done: list[Variant] = []
    for i, variant in enumerate(recipe.variants):
        path = out / "variants" / f"{variant.label}-{key(recipe, i)}.json"
        kept = None if fresh else _finished(path)
        console.print(f"[{i + 1}/{len(recipe.variants)}] {variant.label}{': kept from an earlier run' if kept else ''}", highlight=False)
        done.append(kept or _run_one(recipe, i, path, out))
        results = Results(environment=describe_environment(), variants=done, protocol=dump(recipe.measure), recipe=dump(recipe))
        save_results(results, out / "results.json")
    written = [out / "results.json", *write_report(results, out)]
    print_table(results, console)
    console.print(f"wrote {', '.join(map(str, written))}", highlight=False)
    return results


def key(recipe: Recipe, index: int) -> str:
    """Hash of everything that a variant's figures depend on: itself, the model's files, calibration, measurements, the version."""
    variant = recipe.variants[index]
    reference = variant.model or recipe.model
    content = {
        "variant": dump(variant),
        "baseline": dump(recipe.variants[0]) if index else None,
        "model": [reference, _fingerprint(reference)],
        "rest": [recipe.dtype, recipe.device, dump(recipe.calibration), dump(recipe.measure), describe_environment()["zoo"]],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _fingerprint(reference: str) -> Any:
    """Name, size and time of each file of a local model; a hub id stands for itself (its revision is part of it)."""
    from zoo.checkpoint import package_file

    path = package_file(reference) if reference.startswith("package:") else Path(reference)
    found = sorted(path.glob("*")) if path.is_dir() else [path] if path.exists() else []
    return [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in found if p.is_file()]


def _finished(path: Path) -> Variant | None:
    """The variant that an earlier run left at ``path``, None where there is none or it failed."""
    if not path.is_file():
        return None
    variant = check_results(json.loads(path.read_text(encoding="utf-8"))).variants[0]
    return None if variant.error else variant


def _run_one(recipe: Recipe, index: int, path: Path, out: Path) -> Variant:
    """Run one variant in a child process, which shares the terminal, and read what it wrote."""
    path.parent.mkdir(parents=True, exist_ok=True)
    order = path.with_suffix(".order.json")
    write_atomic(order, json.dumps({"recipe": dump(recipe), "index": index, "out": str(out), "result": str(path)}).encode())
    began = time.perf_counter()
    try:
        code = subprocess.run([sys.executable, "-m", "zoo.recipes.worker", str(order)], check=False).returncode
    finally:
        order.unlink(missing_ok=True)
    found = _finished(path)
    if found:
        return found
    why = _error(path) or f"the process ended with status {code}; see the messages above"
    return Variant(name=recipe.variants[index].label, error=why, seconds={"total": time.perf_counter() - began})


def _error(path: Path) -> str | None:
    if not path.is_file():
        return None
    return check_results(json.loads(path.read_text(encoding="utf-8"))).variants[0].error


def read_order(path: Path) -> tuple[Recipe, int, Path, Path]:
    """(recipe, index of the variant, output folder, result file) as ``_run_one`` wrote them."""
    order = json.loads(path.read_text(encoding="utf-8"))
    return load(Recipe, order["recipe"]), order["index"], Path(order["out"]), Path(order["result"])


def with_only(recipe: Recipe, labels: list[str]) -> Recipe:
    """The recipe with the baseline and the named variants. Raises ValueError with the nearest name."""
    from zoo.components.registry import nearest

    known = [v.label for v in recipe.variants]
    for label in labels:
        if label not in known:
            raise ValueError(f"no variant {label!r} in the recipe{nearest(label, known)}")
    kept = tuple(v for i, v in enumerate(recipe.variants) if i == 0 or v.label in labels)
    return dataclasses.replace(recipe, variants=kept)
