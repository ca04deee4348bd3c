"""Recipes: a model, its variants, and what to measure of each; data in YAML, checked whole before anything runs."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from zoo import conversion
from zoo.components.registry import nearest
from zoo.components.spec import Spec, SpecError, load
from zoo.declare import read_yaml
from zoo.quantize.contracts import Quantizer, Transform

LONGEST = 160  # bytes of a label: file systems allow 255 for a name, and hashes and endings follow it


@dataclass(frozen=True, kw_only=True)
class Calibration(Spec):
    """What quantizers and conversions see. text: a file, None for the prose that ships with Python. samples: windows of ``length``
    tokens. least_tokens: an expert that saw fewer is rounded without data. all_experts: every token is shown to every expert.
    """

    samples: int = 32
    length: int = 512
    seed: int = 0
    text: str | None = None
    least_tokens: int = 1
    all_experts: bool = False


@dataclass(frozen=True, kw_only=True)
class PerplexityMeasure(Spec):
    """text: a file, None for the test text that ships with Python. context, stride: tokens; several contexts are measured one by one,
    the first is the one of the chart. limit: windows at most. prompt: tokens of a window that are read in one call and not scored.
    """

    text: str | None = None
    context: int | tuple[int, ...] | None = None
    stride: int | None = None
    limit: int | None = None
    prompt: int | None = None

    @property
    def contexts(self) -> tuple[int | None, ...]:
        return self.context if isinstance(self.context, tuple) else (self.context,)

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.contexts or len(set(self.contexts)) < len(self.contexts):
            yield "context", f"several contexts differ, and there is at least one, got {list(self.contexts)}"
        for context in self.contexts:
            if self.prompt is not None and not 0 <= self.prompt < (context or self.prompt + 1):
                yield "prompt", f"must leave tokens of the {context} of a window to score, got {self.prompt}"


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
class ImagesMeasure(Spec):
    """Accuracy of an image classifier. folder: with one folder of images for each class; or dataset: those of scikit-learn.

    limit: images at most.
    """

    folder: str | None = None
    dataset: Literal["digits"] | None = None
    limit: int | None = None
    batch_size: int = 32

    @property
    def source(self) -> str:
        return self.folder or self.dataset or ""

    def problems(self) -> Iterator[tuple[str, str]]:
        if (self.folder is None) == (self.dataset is None):
            yield "folder", "name a folder or a dataset, one of them"
        for name, value in (("limit", self.limit), ("batch_size", self.batch_size)):
            if value is not None and value < 1:
                yield name, f"must be at least 1, got {value}"


@dataclass(frozen=True, kw_only=True)
class Measure(Spec):
    """What to measure; memory always is. save: write each variant's folder beside the results, which gives its size on disk."""

    perplexity: PerplexityMeasure | None = None
    tasks: TasksMeasure | None = None
    speed: SpeedMeasure | None = None
    images: ImagesMeasure | None = None
    save: bool = False


@dataclass(frozen=True, kw_only=True)
class Variant(Spec):
    """One row of the table: edits of the spec, conversions of trained parts, transforms and a quantizer with its rules per module, a
    calibrated cache, in that order.

    convert: each as ``zoo.convert`` takes it. calibrated_cache: see ``zoo.quantize.calibrate_cache``. model, dtype: where they differ
    from the recipe's.
    """

    label: str
    override: tuple[str, ...] = ()
    convert: tuple[str | dict[str, Any], ...] = ()
    transforms: tuple[Transform, ...] = ()
    quantizer: Quantizer | None = None
    rules: tuple[str, ...] = ()
    calibrated_cache: Literal["fp8", "int8"] | None = None
    model: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe(Spec):
    """The first variant is the baseline of all comparisons. offload: a folder for quantizers' activations, None: memory."""

    model: str
    variants: tuple[Variant, ...]
    about: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    offload: str | None = None
    calibration: Calibration = Calibration()
    measure: Measure = Measure()

    def problems(self) -> Iterator[tuple[str, str]]:
        labels = [v.label for v in self.variants]
        if not labels:
            yield "variants", "a recipe has at least one variant"
        yield from label_problems(labels)
        if all(m is None for m in (self.measure.perplexity, self.measure.tasks, self.measure.speed, self.measure.images)):
            yield "measure", "nothing to measure; name perplexity, tasks, speed or images"
        if self.measure.images is not None:
            yield from ((f"measure.images.{where}", why) for where, why in self.measure.images.problems())
        if self.measure.perplexity is not None:
            yield from ((f"measure.perplexity.{where}", why) for where, why in self.measure.perplexity.problems())
        for i, variant in enumerate(self.variants):
            yield from ((f"variants.{i}.convert.{j}", why) for j, to in enumerate(variant.convert) for why in conversion.mistakes(to))
            if variant.rules and variant.quantizer is None:
                yield f"variants.{i}.rules", "rules need a quantizer"
            if variant.transforms and variant.quantizer is None:
                yield f"variants.{i}.transforms", "transforms need a quantizer, without one they change nothing"
            for j, transform in enumerate(variant.transforms):
                yield from ((f"variants.{i}.transforms.{j}.{where}", why) for where, why in transform.problems())


def label_problems(labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(place, reason) of labels that cannot name files, or of which two would name the same one on some system."""
    first: dict[str, str] = {}
    for i, label in enumerate(labels):
        place = f"variants.{i}.label"
        if not re.fullmatch(r"[\w+=-][\w.+=-]*", label):
            yield place, f"{label!r} names files: letters, digits, and . _ + = - are allowed, and no dot in front"
        if len(label.encode()) > LONGEST:
            yield place, f"'{label[:24]}...' names files: it has {len(label.encode())} bytes, at most {LONGEST} are allowed"
        other = first.setdefault(unicodedata.normalize("NFKC", label).casefold().rstrip("."), label)
        if other == label and labels.index(label) < i:
            yield place, f"two variants are called {label!r}; names must differ"
        elif other != label:
            yield place, f"{label!r} and {other!r} name the same file where case, accents' spelling or a last dot do not count; rename one"


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
