"""Where in a model a quantization lost what: errors by kind of module and layer, as data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from zoo.quantize.report import Row

PLACE = re.compile(r"layers\.(\d+)\.(.+)")
INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of an expert or a latent, in a path within a layer

Measure = Literal["output_error", "weight_error"]


@dataclass(frozen=True)
class Kind:
    """The modules of one kind in every layer. kind: their path in the layer, ``*`` for the number of an expert.

    modules: in the layer with the most. mean, worst: of their errors, by layer, None for layers that have none or that saw no data.
    """

    kind: str
    modules: int
    mean: tuple[float | None, ...]
    worst: tuple[float | None, ...]


@dataclass(frozen=True)
class ErrorMap:
    """measure: ``output_error``, or ``weight_error`` where no module saw data. layers: up to the last with a quantized module.

    rows: one a kind, in the order of the model, those of a branch together. outside: errors of modules that are in no layer, such as a
    head, by path.
    """

    measure: Measure
    layers: int
    rows: tuple[Kind, ...]
    outside: dict[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for reports and results."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ErrorMap:
        """The inverse of ``to_dict``, also after JSON, where tuples are lists."""
        rows = tuple(Kind(row["kind"], row["modules"], tuple(row["mean"]), tuple(row["worst"])) for row in data["rows"])
        return cls(data["measure"], data["layers"], rows, data["outside"])

    def span(self) -> tuple[float, float] | None:
        """The least and the greatest error above 0 in any layer, None where there is none."""
        found = [v for row in self.rows for v in (*row.mean, *row.worst) if v]
        return (min(found), max(found)) if found else None


def error_map(rows: Sequence[Row]) -> ErrorMap | None:
    """The errors of a report's rows by kind and layer; None without rows."""
    if not rows:
        return None
    measure: Measure = "output_error" if any(row.output_error is not None for row in rows) else "weight_error"
    inside: dict[str, dict[int, list[float | None]]] = {}
    outside: dict[str, float | None] = {}
    for row in rows:
        where = place(row.module)
        if where is None:
            outside[row.module] = _finite(getattr(row, measure))
        else:
            layer, kind = where
            inside.setdefault(kind, {}).setdefault(layer, []).append(_finite(getattr(row, measure)))
    layers = 1 + max((layer for errors in inside.values() for layer in errors), default=-1)
    branches = list(dict.fromkeys(kind.partition(".")[0] for kind in inside))
    order = sorted(inside, key=lambda kind: branches.index(kind.partition(".")[0]))  # layers may differ in their kinds
    return ErrorMap(measure, layers, tuple(_kind(kind, inside[kind], layers) for kind in order), outside)


def place(path: str) -> tuple[int, str] | None:
    """(layer, kind) of a module by its path; None outside the layers."""
    found = PLACE.fullmatch(path)
    return None if found is None else (int(found[1]), INDEX.sub("*", found[2]))


def _kind(kind: str, errors: dict[int, list[float | None]], layers: int) -> Kind:
    known = [[e for e in errors.get(layer, ()) if e is not None] for layer in range(layers)]
    mean, worst = (tuple(reduce(e) if e else None for e in known) for reduce in (_mean, max))
    return Kind(kind, max(map(len, errors.values())), mean, worst)


def _mean(values: Iterable[float]) -> float:
    held = list(values)
    return sum(held) / len(held)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
