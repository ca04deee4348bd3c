"""Accuracy of image classifiers on a folder of images, or on the digits that come with scikit-learn.

The result is that of a task called ``images``, so tables, reports and paired comparisons need nothing more.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from zoo.classify import label_names, logits
from zoo.eval.harness import Evaluation, TaskResult
from zoo.images import Preprocessing, open_image, preprocessing_of
from zoo.model import Model

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"})
TASK = "images"
TOP = 5
DIGITS_TO_TRAIN_ON = 1437  # of 1,797; the others are measured


@dataclass(frozen=True)
class LabelledImages:
    """Images with the number of each one's class in ``classes``. read: the image of a number. version: changes with the data."""

    name: str
    classes: list[str]
    targets: list[int]
    read: Callable[[int], Image]
    version: str

    def __len__(self) -> int:
        return len(self.targets)


def image_accuracy(model: Model, images: str | Path | LabelledImages, *, limit: int | None = None, batch_size: int = 32,
                   preprocessing: Preprocessing | None = None, progress: bool = False) -> Evaluation:  # fmt: skip
    """The share of images whose most likely label is right (``acc``), and with more than five labels one of the first five (``acc5``).

    images: ``digits``, or a folder with one folder of images for each class, called as the label or its number; other names are
    taken in alphabetical order where they are as many as the labels (torchvision's ImageFolder). limit: images at most, drawn
    evenly and always the same. preprocessing: in place of the checkpoint's own. progress: show it on a terminal.

    Raises ValueError, before the model runs, for a model that classifies no images, for classes that are no labels of it and for an
    empty folder; ImageError for a damaged image.
    """
    began = time.perf_counter()
    if batch_size < 1 or (limit is not None and limit < 1):
        raise ValueError(f"batch_size and limit must be at least 1, got {batch_size} and {limit}")
    names, prepare = label_names(model), preprocessing or preprocessing_of(model)
    data = images if isinstance(images, LabelledImages) else labelled(images)
    labels = match(data.classes, names)
    chosen = sorted(random.Random(0).sample(range(len(data)), min(limit or len(data), len(data))))
    ranks: list[int] = []
    for batch in shown([chosen[i : i + batch_size] for i in range(0, len(chosen), batch_size)], progress):
        out = logits(model, [prepare(data.read(i)) for i in batch])
        right = out.gather(1, out.new_tensor([[labels[data.targets[i]]] for i in batch]).long())
        ranks += (~(out < right)).sum(1).tolist()  # how many are at least as likely, itself included; all of them where it is NaN
    settings = {"images": data.name, "limit": limit, "batch_size": batch_size, "preprocessing": repr(prepare)}
    return Evaluation(tasks={TASK: result(ranks, len(names), data.version)}, settings=settings, seconds=time.perf_counter() - began)


def result(ranks: Sequence[int], labels: int, version: str) -> TaskResult:
    """ranks: the place of each image's right label, 1 is the most likely."""
    items = {name: tuple(float(r <= top) for r in ranks) for name, top in (("acc", 1), ("acc5", TOP)) if top < labels}
    metrics = {name: fmean(values) for name, values in items.items()}
    spread = {name: math.sqrt(m * (1 - m) / (len(ranks) - 1)) if len(ranks) > 1 else None for name, m in metrics.items()}
    return TaskResult(metrics=metrics, stderr=spread, n=len(ranks), version=version, shots=None,
                      higher_is_better=dict.fromkeys(metrics, True), items=items)  # fmt: skip


def joined(first: Evaluation | None, second: Evaluation) -> Evaluation:
    """Both evaluations of one model as one."""
    if first is None:
        return second
    settings = {**first.settings, TASK: second.settings}
    return replace(first, tasks={**first.tasks, **second.tasks}, settings=settings, seconds=first.seconds + second.seconds)


def shown(batches: Sequence[list[int]], progress: bool) -> Any:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(batches, "images", console=console, disable=not (progress and console.is_terminal))


# ---- the data ----------------------------------------------------------------------------------------------------------------


def labelled(source: str | Path) -> LabelledImages:
    """``digits`` (those that are not for training), or a folder. Raises ValueError for anything else."""
    return digits() if str(source) == "digits" else folder(Path(source).expanduser())


def folder(path: Path) -> LabelledImages:
    """A folder with a folder of images for each class; images may lie deeper. Raises ValueError naming what is missing."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder of images (and not `digits`)")
    classes = sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    found = [(file, i) for i, name in enumerate(classes) for file in sorted((path / name).rglob("*")) if file.suffix.lower() in SUFFIXES]
    empty = sorted(set(classes) - {classes[i] for _, i in found})
    if empty or not classes:
        what = f"no images in {', '.join(empty)}" if empty else "no folders in it; images lie in one folder for each class"
        raise ValueError(f"{path}: {what}; images end in {', '.join(sorted(SUFFIXES))}")
    files = [file for file, _ in found]
    return LabelledImages(path.name, classes, [i for _, i in found], lambda i: open_image(files[i]), fingerprint(path, files))


def fingerprint(root: Path, files: Sequence[Path]) -> str:
    """A hash of names and contents."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.relative_to(root).as_posix()}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]


def digits(part: Literal["train", "test"] = "test") -> LabelledImages:
    """scikit-learn's 8 x 8 gray digits: the first 1,437 to train on, or the 360 others. Raises ValueError without scikit-learn."""
    try:
        from sklearn import __version__ as version
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the digits come with scikit-learn, which is not installed; pip install scikit-learn") from None
    import numpy as np
    from PIL import Image

    whole: Any = load_digits()
    where = slice(DIGITS_TO_TRAIN_ON) if part == "train" else slice(DIGITS_TO_TRAIN_ON, None)
    pixels = (whole.images[where] * (255 / 16)).round().astype(np.uint8)
    targets = [int(t) for t in whole.target[where]]
    return LabelledImages("digits", [str(i) for i in range(10)], targets, lambda i: Image.fromarray(pixels[i]), version)


def match(classes: Sequence[str], labels: Sequence[str]) -> list[int]:
    """The number of each class's label: by its name, by one of its names between commas, by number, or else all in order."""
    spelled = [(word.strip(), i) for i, label in enumerate(labels) for word in {label, *label.split(",")}]
    often = Counter(word for word, _ in spelled)
    known = {word: i for word, i in spelled if often[word] == 1 or word == labels[i]}
    if all(name in known for name in classes):
        return [known[name] for name in classes]
    if all(name.isdecimal() and int(name) < len(labels) for name in classes):
        return [int(name) for name in classes]
    if len(classes) == len(labels) and not any(name in known for name in classes):
        return list(range(len(labels)))
    strange = [name for name in classes if name not in known]
    raise ValueError(f"{len(strange)} of {len(classes)} classes are no labels of the model: {', '.join(strange[:8])}; "
                     f"it has {len(labels)} labels: {', '.join(list(labels)[:8])}, ...")  # fmt: skip
