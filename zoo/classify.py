"""What is on images: the labels of a classifier, most likely first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.images import named, prepared, preprocessing_of
from zoo.model import Model

BATCH = 16
NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Score:
    """A label and its probability, a softmax over all labels."""

    label: str
    probability: float


def classify(model: Model, images: Sequence[str | Path], *, top: int = 5, batch_size: int = BATCH) -> list[list[Score]]:
    """The ``top`` labels of each image file, most likely first. The model may be loaded lazily: images are read before its weights.

    Raises ValueError for a model that does not classify images or does not say how they are prepared, and ImageError for a file that
    is no image, all before the model runs.
    """
    if min(top, batch_size) < 1:
        raise ValueError(f"top and batch_size must be at least 1, got {top} and {batch_size}")
    prepare, names = preprocessing_of(model), label_names(model)
    pixels = [prepared(prepare, path) for path in images]
    if model.source is not None and model.placement is None and any(p.is_meta for p in model.parameters()):
        model.source.fill(model)
    if not pixels:
        return []
    chances = torch.cat([logits(model, pixels[i : i + batch_size]) for i in range(0, len(pixels), batch_size)])
    damaged = [str(path) for path, row in zip(images, chances, strict=True) if not row.isfinite().all()]
    if damaged:
        raise ValueError(f"{damaged[0]}: the model's outputs are not finite numbers; try dtype float32, or download the weights again")
    return [[Score(names[i], float(row[i])) for i in row.argsort(descending=True, stable=True)[:top].tolist()]
            for row in chances.double().softmax(-1)]  # fmt: skip


@torch.no_grad()
def logits(model: Model, pixels: Sequence[Tensor]) -> Tensor:
    """Prepared images [C, H, W] each -> [images, labels] float32 on the CPU; those of one size run together."""
    found: dict[int, Tensor] = {}
    for size in dict.fromkeys(p.shape for p in pixels):
        where = [i for i, p in enumerate(pixels) if p.shape == size]
        out = model(torch.stack([pixels[i] for i in where]).to(model.device, model.dtype))
        found.update(zip(where, out.float().cpu(), strict=True))
    return torch.stack([found[i] for i in range(len(pixels))])


def label_names(model: Model) -> list[str]:
    """The names of a classifier's outputs: config.json's ``id2label``, else their numbers.

    Raises ValueError for a model that does not classify and for names that are not as many as its outputs.
    """
    count = getattr(model.spec.head, "labels", None)
    if count is None:
        raise ValueError(f"the model has no classifier: its head is {model.spec.head.name}, which gives no labels")
    labels = model.config.get("id2label") or {}
    if not isinstance(labels, Mapping) or not all(NUMBER.fullmatch(str(number)) for number in labels):
        raise ValueError(f"{named(model)}: config.json's id2label must be an object of numbers and names, it is {labels!r:.60}; correct it")
    given = {int(number): str(label) for number, label in labels.items()}
    if given and sorted(given) != list(range(count)):
        raise ValueError(f"config.json names {len(given)} labels in id2label, the classifier has {count} outputs")
    return [given.get(i, str(i)) for i in range(count)]


def as_data(images: Iterable[str | Path], scores: Iterable[list[Score]]) -> list[dict[str, Any]]:
    """For JSON: one object an image."""
    return [{"image": str(image), "labels": [asdict(s) for s in found]} for image, found in zip(images, scores, strict=True)]


def as_table(images: Iterable[str | Path], scores: Iterable[list[Score]]) -> Any:
    """For the terminal: a rich table with a row for each label."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("image", "label", "probability", show_edge=False)
    for image, found in zip(images, scores, strict=True):
        for i, score in enumerate(found):
            table.add_row(escape(str(image)) if i == 0 else "", escape(score.label), f"{score.probability:.1%}")
    return table
