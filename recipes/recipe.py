"""Recipes: a model, its variants, and what to measure of each; data in YAML, checked whole before anything runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from zoo.components.registry import nearest
from zoo.components.spec import Spec, SpecError, load
from zoo.declare import read_yaml
from zoo.quantize.contracts import Quantizer


@dataclass(frozen=True, kw_only=True)
class Calibration(Spec):
    """What quantizers see. text: a file, None for the prose that ships with Python. samples: windows of ``length`` tokens."""

    samples: int = 32
    length: int = 512
    seed: int = 0
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class PerplexityMeasure(Spec):
    """text: a file, None for the test text that ships with Python. context, stride: tokens. limit: windows at most."""

    text: str | None = None
    context: int | None = None
    stride: int | None = None
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class TasksMeasure(Spec):
    """lm-eval tasks by name. limit: documents of each. data: the folder of tasks that read local files."""

    names: tuple[str, ...]
    limit: int | None = None
    shots: int | None = None
    batch_size: int = 8
    data: str | None = None


@dataclass(frozen=True, kw_only=True)
class SpeedMeasure(Spec):
    """Lengths in tokens; every batch size is measured, the first one is the table's."""

    prompt_tokens: int = 512
    new_tokens: int = 64
    batch_sizes: tuple[int, ...] = (1,)
    repeats: int = 3
    warmup: int = 1


@dataclass(frozen=True, kw_only=True)
class Measure(Spec):
    """What to measure; memory always is. save: write each variant's folder beside the results, which gives its size on disk."""

    perplexity: PerplexityMeasure | None = None
    tasks: TasksMeasure | None = None
    speed: SpeedMeasure | None = None
    save: bool = False


@dataclass(frozen=True, kw_only=True)
class Variant(Spec):
    """One row of the table: edits of the spec, a quantizer with its rules per module, or both.

    model, dtype: where they differ from the recipe's.
    """

    label: str
    override: tuple[str, ...] = ()
    quantizer: Quantizer | None = None
    rules: tuple[str, ...] = ()
    model: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe(Spec):
    """The first variant is the baseline of all comparisons."""

    model: str
    variants: tuple[Variant, ...]
    about: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    calibration: Calibration = Calibration()
    measure: Measure = Measure()

    def problems(self) -> Iterator[tuple[str, str]]:
        labels = [v.label for v in self.variants]
        if not labels:
            yield "variants", "a recipe has at least one variant"
        for i, label in enumerate(labels):
            if not re.fullmatch(r"[\w+=-][\w.+=-]*", label):
                yield f"variants.{i}.label", f"{label!r} names files: letters, digits, and . _ + = - are allowed, and no dot in front"
        for label in sorted({x for x in labels if labels.count(x) > 1}):
            yield "variants", f"two variants are called {label!r}; names must differ"
        if all(m is None for m in (self.measure.perplexity, self.measure.tasks, self.measure.speed)):
            yield "measure", "nothing to measure; name perplexity, tasks or speed"
        for i, variant in enumerate(self.variants):
            if variant.rules and variant.quantizer is None:
                yield f"variants.{i}.rules", "rules need a quantizer"


def read_recipe(path: str | Path, *edits: str) -> Recipe:
    """A recipe from a file, or a built-in one by name (``quickstart``), with its imports. Raises SpecError with every mistake."""
    from zoo.components.spec import check, override

    recipe = override(load(Recipe, _read(_find(str(path)), ())), *edits)
    problems = check(recipe)
    if problems:
        raise SpecError(problems)
    return recipe


def names() -> list[str]:
    """The recipes that ship with the zoo."""
    return sorted(p.name.removesuffix(".yaml") for p in files("zoo.recipes").iterdir() if p.name.endswith(".yaml"))


def _find(text: str) -> Any:
    path = Path(text)
    if path.is_file():
        return path
    name = path.name.removesuffix(".yaml")
    if name in names() and (path.parent == Path() or path.parent.name == "recipes"):  # installed without the repository
        return files("zoo.recipes") / f"{name}.yaml"
    raise ValueError(f"{text}: no such recipe{nearest(name, names())}")


def _read(path: Any, above: tuple[str, ...]) -> dict[str, Any]:
    """A file's data over that of its imports, later ones over earlier ones; imports are relative to the file."""
    here = str(path.resolve() if isinstance(path, Path) else path)
    if here in above:
        raise ValueError(f"{path}: imports itself by way of {' -> '.join(above)}")
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a recipe is a mapping, this is a {type(data).__name__}")
    merged: dict[str, Any] = {}
    imports = data.pop("imports", [])
    if not isinstance(imports, list) or not all(isinstance(name, str) for name in imports):
        raise ValueError(f"{path}: imports is a list of file names, not {imports!r}")
    for name in imports:
        merged = merge(merged, _read(path.parent / name if isinstance(path, Path) else files("zoo.recipes") / name, (*above, here)))
    return merge(merged, data)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings merge, ``variants`` are appended, everything else is replaced."""
    out = dict(below)
    for key, value in above.items():
        if key == "variants" and key in out:
            out[key] = [*out[key], *value]
        elif isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = merge(out[key], value)
        else:
            out[key] = value
    return out
