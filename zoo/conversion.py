"""Conversions of trained models: one kind of part becomes another, and the weights follow.

A conversion is the part START_to_END of the family ``conversion``: it says what a layer becomes and makes its tensors. Each says
whether the model still computes the same numbers, or else how far its weights are from the ones before.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from zoo.components import registry
from zoo.components.contracts import Linear, StoredLinear
from zoo.components.spec import Spec, SpecError, check, load, transform
from zoo.model import LayerSpec, Model, ModelSpec

S = TypeVar("S", bound=Spec)
Tensors = dict[str, Tensor]
PLACES = ("mixer.projection", "mixer.position", "mlp")
registry.declare("conversion", "zoo.conversions", "how one kind of part becomes another, weights included")


class ConversionError(ValueError):
    """A model that cannot be converted as asked."""


class Work(NamedTuple):
    """One layer to convert.

    index: of the layer. old, new: before and after. held: its tensors, dense and float32, named from the layer. moment: [M, M] float64
    second moment of the mixer's input, where there is calibration text.
    """

    index: int
    old: LayerSpec
    new: LayerSpec
    held: Tensors
    moment: Tensor | None


class Converted(NamedTuple):
    """What became of one layer.

    tensors: float32, those that are new or changed, named from the layer. exact: the layer computes what it did, up to rounding.
    error: relative Frobenius distance of the weights concerned. lost: what the error does not show, in words.
    """

    tensors: Tensors
    exact: bool
    error: float = 0.0
    lost: str = ""


class Row(NamedTuple):
    """One converted layer in the report."""

    layer: int
    conversion: str
    exact: bool
    weight_error: float
    lost: str


@dataclass(frozen=True)
class Report:
    """What a conversion did to a model. weight_error: the largest of the layers'."""

    rows: list[Row]

    @property
    def exact(self) -> bool:
        return all(row.exact for row in self.rows)

    @property
    def weight_error(self) -> float:
        return max(row.weight_error for row in self.rows)

    @property
    def lost(self) -> list[str]:
        return sorted({row.lost for row in self.rows} - {""})

    def __str__(self) -> str:
        name, layers = self.rows[0].conversion, f"{len(self.rows)} layers"
        if self.exact:
            return f"{name}, {layers}: exact"
        return "; ".join([f"{name}, {layers}: weights differ by at most {self.weight_error:.4f}", *self.lost])


@dataclass(frozen=True, kw_only=True)
class Conversion(Spec):
    """From one kind of part to another. The part name is START_to_END.

    place: where in a layer the part stands. calibrated: it can use the second moment of the mixer's input.
    """

    family: ClassVar[str] = "conversion"
    place: ClassVar[str] = "mixer.projection"
    calibrated: ClassVar[bool] = False

    @abstractmethod
    def target(self, layer: LayerSpec, width: int) -> LayerSpec:
        """What the layer becomes. Raises ConversionError with the reason where it cannot."""

    @abstractmethod
    def convert(self, work: Work) -> Converted:
        """The new layer's tensors."""


def convert(model: Model, to: str | Mapping[str, Any], *, ids: Tensor | None = None) -> tuple[Model, Report]:
    """A new model whose parts are of the kind ``to`` wherever a conversion leads there; the old one is left as it is.

    Tensors that do not change are shared with the old model.

    to: the name of a part, or a mapping with ``name`` and the conversion's fields, as {name: latent, rank: 64}. ids: [B, T] int64
    tokens of calibration text; conversions that lose something then lose what such text needs least. Converted linear parts are
    dense and of the model's dtype. Raises ConversionError, before any work, where no layer can be converted or one cannot.
    """
    moves = plan(model.spec, to)
    width = model.spec.width
    layers = [moves[i].target(layer, width) if i in moves else layer for i, layer in enumerate(model.spec.layers)]
    spec = dataclasses.replace(model.spec, layers=tuple(layers))
    problems = check(spec)
    if problems:
        raise SpecError(problems)
    needed = [i for i, move in moves.items() if move.calibrated]
    moments = second_moments(model, ids, needed) if ids is not None else {}
    state, rows = model.state_dict(), []
    for i, move in moves.items():
        done = move.convert(Work(i, model.spec.layers[i], layers[i], dense_tensors(model.layers[i]), moments.get(i)))
        state = exchange(state, f"layers.{i}.", done.tensors, spec, model.dtype)
        rows.append(Row(i, move.name, done.exact, done.error, done.lost))
    return rebuilt(model, spec, state), Report(rows)


def plan(spec: ModelSpec, to: str | Mapping[str, Any]) -> dict[int, Conversion]:
    """The conversion of each layer that one applies to. Raises ConversionError, listing what can be reached, if there is none."""
    fields = {"name": to} if isinstance(to, str) else dict(to)
    word = str(fields.pop("name", ""))
    known = registry.names("conversion")
    moves: dict[int, Conversion] = {}
    for i, layer in enumerate(spec.layers):
        names = [f"{_at(layer, place).name}_to_{word}" for place in PLACES]
        found = next((name for name in names if name in known), None)
        if found:
            moves[i] = load(Conversion, {"name": found, **fields}, place="to")
    if not moves:
        here = {_at(layer, place).name for layer in spec.layers for place in PLACES}
        reachable = sorted(name.replace("_to_", " to ") for name in known if name.partition("_to_")[0] in here)
        raise ConversionError(
            f"nothing in this model converts to {word!r}; it has {', '.join(sorted(here))}. Reachable: {', '.join(reachable)}"
        )
    return moves


def _at(layer: LayerSpec, place: str) -> Any:
    return reduce(getattr, place.split("."), layer)


def unpacked(spec: S) -> S:
    """The spec with dense linear parts."""
    return transform(spec, lambda part: load(Linear, "dense") if isinstance(part, Linear) else part)


def dense_tensors(layer: nn.Module) -> Tensors:
    """The layer's tensors in float32, stored linear modules as the matrices that they stand for."""
    found = dict(layer.state_dict())
    for path, module in layer.named_modules():
        if isinstance(module, StoredLinear):
            for name in module.canonical():
                found.pop(f"{path}.{name}")
            found[f"{path}.weight"] = module.dense_weight(torch.float32)  # pyright: ignore[reportCallIssue]
            if module.bias is not None:
                found[f"{path}.bias"] = module.bias
    return {name: tensor.detach().float() for name, tensor in found.items()}


def exchange(state: Tensors, prefix: str, new: Tensors, spec: ModelSpec, dtype: torch.dtype) -> Tensors:
    """The state with one layer's new tensors in, in the dtype that each is held in, and without those that it no longer has."""
    tensors = spec.tensors()
    kinds = {name: getattr(torch, info.dtype) if info.dtype else dtype for name, info in tensors.items()}
    changed = {prefix + name: tensor.to(kinds[prefix + name]).contiguous() for name, tensor in new.items()}
    return {n: t for n, t in state.items() if not n.startswith(prefix) or n in tensors} | changed


def rebuilt(model: Model, spec: ModelSpec, state: Tensors) -> Model:
    """A model of ``spec`` with these tensors."""
    with torch.device("meta"):
        new = spec.build()
    new.load_state_dict(state, assign=True)
    new.requires_grad_(any(p.requires_grad for p in model.parameters()))  # loaded models are frozen
    new.tie()
    new.config, new.source = model.config, model.source and dataclasses.replace(model.source, table=[])
    return new.eval()


@torch.no_grad()
def second_moments(model: Model, ids: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """Mean x x^T [M, M] float64 of the inputs of each layer's key projection."""
    sums = {i: torch.zeros(model.spec.width, model.spec.width, dtype=torch.float64) for i in layers}

    def adder(i: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            flat = args[0].flatten(0, -2).cpu().double()
            sums[i] += flat.T @ flat

        return add

    with ExitStack() as stack:
        for i in layers:
            keys = model.layers[i].get_submodule("mixer.projection.k")
            stack.callback(keys.register_forward_pre_hook(adder(i)).remove)
        for row in ids.split(1):
            model(row.to(model.device))
    return {i: total / ids.numel() for i, total in sums.items()}


def relative(new: Tensor, old: Tensor) -> float:
    """Frobenius distance over the norm of ``old``."""
    return float((new - old).norm() / old.norm())
