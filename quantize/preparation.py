"""The transforms of a quantization: what they may do is settled before work starts, and done stage by stage as weights arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from zoo.components.contracts import StoredLinear
from zoo.components.spec import SpecError, check
from zoo.components.spec import load as load_spec
from zoo.model import Model, ModelSpec
from zoo.quantize.contracts import ChannelScaling, Quantizer, Transform, Turning
from zoo.quantize.flow import Fold, folds
from zoo.quantize.report import Change
from zoo.quantize.scaling import Surroundings, scale_stage
from zoo.quantize.stage import load
from zoo.quantize.turning import Turner, refuses, untied
from zoo.weights import below, folded, linears

TransformLike = str | Mapping[str, Any] | Transform


def wanted_transforms(given: Sequence[TransformLike], methods: Iterable[Quantizer]) -> tuple[Transform, ...]:
    """The transforms by name or spec, and those that methods bring. Raises SpecError, or ValueError for an order that undoes one."""
    found = [load_spec(Transform, one, place=f"transforms.{i}") for i, one in enumerate(given)]
    brought = dict.fromkeys(name for method in methods for name in method.transforms)
    found += [load_spec(Transform, name) for name in brought if name not in [t.name for t in found]]
    problems = [line for i, one in enumerate(found) for line in check(one, place=f"transforms.{i}")]
    if problems:
        raise SpecError(problems)
    order = [isinstance(one, Turning) for one in found]
    if order != sorted(order, reverse=True):
        first, later = found[order.index(False)], found[len(order) - 1 - order[::-1].index(True)]
        raise ValueError(f"transforms: {later.name} moves the gains of norms into weights, which undoes {first.name}; name it before")
    return tuple(found)


def spec_after(spec: ModelSpec, transforms: Sequence[Transform]) -> ModelSpec:
    """The spec as transforms will make it: a rotation of the stream gives a tied head a matrix of its own."""
    return untied(spec) if any(isinstance(t, Turning) and t.stream(spec.width) is not None for t in transforms) else spec


class Preparation:
    """The transforms of one run. Raises ValueError, with the reasons, for those that cannot be made anywhere in the model."""

    def __init__(self, model: Model, transforms: Sequence[Transform], chosen: Mapping[str, Quantizer]):
        self.model, self.chosen = model, chosen
        self.scalings = [t for t in transforms if isinstance(t, ChannelScaling)]
        turnings = [t for t in transforms if isinstance(t, Turning)]
        self.changes: list[Change] = []
        self.ready: set[str] = set()
        self.folds, self.refused = usable(model.spec, chosen) if transforms else ([], {})
        for turning in turnings:
            self._check_turning(turning)
        for scaling in self.scalings:
            self._check_scaling(scaling)
        self.turners = [Turner(model, turning) for turning in turnings]

    def _check_turning(self, turning: Turning) -> None:
        width, reasons = self.model.spec.width, []
        if turning.stream(width) is not None:
            reasons += list(refuses(self.model.spec))
        elif not any(fold.kind == "value" and fold.mixes for fold in folds(self.model.spec)[0]):
            reasons.append("no layer passes values on as they are")
        reasons += [f"{p}: is quantized already ({c.spec.name})" for p, c in linears(self.model.spec) if c.spec.name != "dense"]
        if reasons:
            raise ValueError(_cannot(turning, reasons))

    def _check_scaling(self, scaling: ChannelScaling) -> None:
        reasons = {r: layers for r, layers in self.refused.items() if r.partition(":")[0] in scaling.sources}
        if not any(fold.kind in scaling.sources for fold in self.folds):
            why = [f"{reason} ({folded(layers)})" for reason, layers in reasons.items()] or ["no module that a scale reaches is quantized"]
            raise ValueError(_cannot(scaling, why))
        self.changes += [Change(scaling.name, folded(layers), {"skipped": reason}) for reason, layers in reasons.items()]

    @property
    def active(self) -> bool:
        """Whether there is any transform."""
        return bool(self.scalings or self.turners)

    def restore(self, parts: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
        """Give parts of the model, in whose place quantized modules are already, their tensors as they were stored after transforms."""
        parts = list(parts)
        self.ready.update(parts)
        for module, prefix in ((self.model.get_submodule(part), f"{part}.") for part in parts):
            for name, held in (*module.named_parameters(prefix=prefix[:-1]), *module.named_buffers(prefix=prefix[:-1])):
                if name in tensors and not _in_storage(self.model, name):
                    held.data.copy_(tensors[name])

    def begin(self) -> None:
        """Load the embedding and transform it; nothing without a rotation."""
        if self.turners:
            load(self.model, "embed")
        for turner in self.turners:
            self.changes += turner.begin()

    def enter(self, parts: Iterable[str]) -> None:
        """Load parts of the model, and rotate those that are seen for the first time."""
        parts = list(parts)
        load(self.model, *parts)
        fresh = [part for part in parts if part not in self.ready]
        self.ready.update(fresh)
        for turner in self.turners:
            for part in fresh:
                if part.startswith("layers."):
                    turner.layer(int(part.split(".")[1]))
            if "head" in fresh:
                turner.head()

    def finish(self) -> None:
        """Load and rotate what no stage was about."""
        load(self.model, "embed")
        for i in range(len(self.model.layers)):
            self.enter([f"layers.{i}"])
        self.enter(["head", "norm"])

    def scale(self, name: str, around: Surroundings) -> list[Change]:
        """Scale the channels of a stage."""
        mine = [fold for fold in self.folds if below(name, fold.source) or (name == "head" and fold.source == "norm")]
        groups = ((scaling, [fold for fold in mine if fold.kind in scaling.sources]) for scaling in self.scalings)
        return [change for scaling, some in groups if some for change in scale_stage(scaling, some, around)]


def usable(spec: ModelSpec, chosen: Mapping[str, Quantizer]) -> tuple[list[Fold], dict[str, list[str]]]:
    """The folds that help a module which is quantized and touch only dense ones, and why layers lack others."""
    found, refused = folds(spec)
    storages = {path: child.spec.name for path, child in linears(spec)}
    kept = []
    for fold in found:
        touched = [*fold.readers.modules, fold.source]
        packed = [path for path in touched if storages.get(path, "dense") != "dense"]
        if packed:
            refused.setdefault(f"{fold.kind}: {packed[0]} is quantized already", []).append(fold.source)
        elif any(path in chosen for path in fold.readers.modules):
            kept.append(_judged(fold, chosen))
    return kept, refused


def _judged(fold: Fold, chosen: Mapping[str, Quantizer]) -> Fold:
    """The fold; readers that are kept are scaled too, but rounding is judged at those that are quantized, which come first."""
    order = sorted(fold.readers.modules, key=lambda path: path not in chosen)
    return replace(fold, readers=replace(fold.readers, modules=tuple(order)))


def _cannot(transform: Transform, reasons: Sequence[str]) -> str:
    return f"{transform.name} cannot be folded into this model's weights:\n  " + "\n  ".join(dict.fromkeys(reasons))


def _in_storage(model: Model, name: str) -> bool:
    """Whether a tensor is one of a quantized module's own, which are in place."""
    owner, _, leaf = name.rpartition(".")
    return isinstance(model.get_submodule(owner), StoredLinear) and leaf != "bias"


def stage_tensors(model: Model, parts: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Every tensor of some parts of the model as it is saved, by path: what a stage that was transformed is restored from."""
    for part in parts:
        yield from model.get_submodule(part).state_dict(prefix=f"{part}.").items()
