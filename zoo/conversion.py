"""Conversions of trained models: one kind of part becomes another, and the weights follow.

A conversion is the part START_to_END of the family ``conversion``: it says what a layer becomes and makes its tensors. Each says
whether the model still computes the same numbers, or else how far its weights are from the ones before.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from zoo.components import registry
from zoo.components.contracts import Linear, StoredLinear, unfilled
from zoo.components.spec import Spec, SpecError, check, indices, load, picks, read_value, transform
from zoo.loading import finish
from zoo.model import Model, ModelSpec

S = TypeVar("S", bound=Spec)
Tensors = dict[str, Tensor]
To = str | Mapping[str, Any]
PLACES = ("mixer.projection", "mixer.position", "mlp", "position")  # the last one in the embedding, the others in layers
SHORT: dict[str, dict[str, Any]] = {
    "mha": {"name": "gqa", "kv_heads": None},
    "mqa": {"name": "gqa", "kv_heads": 1},
    "mla": {"name": "latent"},
    "half": {"name": "rope", "layout": "half"},
    "interleaved": {"name": "rope", "layout": "interleaved"},
}


class ConversionError(ValueError):
    """A model that cannot be converted as asked."""


class Work(NamedTuple):
    """One site to convert: a layer, or the embedding.

    path: of the site, ``layers.3`` or ``embed``. old, new: its spec before and after. held: its tensors, dense and float32, named
    from the site. moment: [M, M] float64 second moment of the mixer's input, where there is calibration text.
    """

    path: str
    old: Any
    new: Any
    held: Tensors
    moment: Tensor | None


class Converted(NamedTuple):
    """What became of one site.

    tensors: float32, those that are new or changed, named from the site. exact: the model computes what it did, up to rounding.
    error: relative Frobenius distance of the weights concerned. lost: what the error does not show, in words.
    """

    tensors: Tensors
    exact: bool
    error: float = 0.0
    lost: str = ""


class Row(NamedTuple):
    """One converted site in the report, or all that a conversion did alike. where: ``layers.3``, ``layers.0:30``, ``embed``."""

    where: str
    conversion: str
    exact: bool
    weight_error: float
    lost: str


@dataclass(frozen=True)
class Report:
    """What a conversion did to a model. weight_error: the largest of the rows'."""

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

    def kinds(self) -> list[Row]:
        """One row for each conversion and what it lost, with the largest weight error."""
        groups: dict[tuple[str, bool, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.conversion, row.exact, row.lost), []).append(row)
        return [
            Row(_together([row.where for row in rows]), name, exact, max(row.weight_error for row in rows), lost)
            for (name, exact, lost), rows in groups.items()
        ]

    def __str__(self) -> str:
        return "\n".join("; ".join([f"{k.conversion} at {k.where}: {said(k)}", *filter(None, [k.lost])]) for k in self.kinds())


def said(row: Row) -> str:
    """Whether the weights still say the same, in words."""
    return "exact" if row.exact else f"weights differ by at most {row.weight_error:.4f}"


def _together(places: Sequence[str]) -> str:
    layers = [int(place.removeprefix("layers.")) for place in places if place.startswith("layers.")]
    return f"layers.{indices(layers)}" if layers else ", ".join(places)


@dataclass(frozen=True, kw_only=True)
class Conversion(Spec):
    """From one kind of part to another. The part name is START_to_END. place: where in its site the part stands."""

    family: ClassVar[str] = "conversion"
    place: ClassVar[str] = "mixer.projection"

    @property
    def calibrated(self) -> bool:
        """It loses something, and less where it knows the second moment of the mixer's input."""
        return False

    @abstractmethod
    def target(self, site: Any, width: int) -> Any:
        """What the spec of a layer or of the embedding becomes. Raises ConversionError with the reason where it cannot."""

    @abstractmethod
    def convert(self, work: Work) -> Converted:
        """The new site's tensors."""

    def context(self, spec: ModelSpec) -> int:
        """Positions that the model is for once it is converted."""
        return spec.context


# ---- what is asked -----------------------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """word: what a part is to become. fields: of the conversion. where: path of the part as overrides write it, "" is anywhere."""

    word: str
    fields: dict[str, Any]
    where: str

    def takes(self, path: str, layers: int) -> bool:
        """Whether the part at ``path`` is meant."""
        pattern, steps = self.where.split("."), path.split(".")
        each = (picks(p, int(s), layers) if s.isdigit() else fnmatchcase(s, p) for p, s in zip(pattern, steps, strict=False))
        return not self.where or (len(pattern) == len(steps) and all(each))


class Plan(NamedTuple):
    """moves: the conversion of each site, by path. spec: what the model becomes."""

    moves: dict[str, Conversion]
    spec: ModelSpec

    @property
    def calibrated(self) -> bool:
        """Calibration text would change the outcome."""
        return any(move.calibrated for move in self.moves.values())


def read(to: To) -> Wanted:
    """Raises SpecError for what is no conversion at all: text that is not YAML, unknown words and fields, values of another type."""
    where, equals, raw = to.partition("=") if isinstance(to, str) else ("", "", "")
    value = read_value(raw if equals else to) if isinstance(to, str) else to
    if not isinstance(value, (str, Mapping)):
        raise SpecError([f"to: expected a name, or a mapping with a name, got {value!r}"])
    fields = {"name": value} if isinstance(value, str) else dict(value)
    word = str(fields.pop("name", ""))
    short = dict(SHORT.get(word, {"name": word}))
    if twice := sorted(short.keys() & fields.keys()):
        raise SpecError([f"to.{name}: {word} says it already; write {short['name']!r} to choose it" for name in twice])
    wanted = Wanted(short.pop("name"), short | fields, where.strip() if equals else "")
    _check(word, wanted)
    return wanted


def mistakes(to: To) -> list[str]:
    """What ``read`` raises, as reasons without a place."""
    try:
        read(to)
    except SpecError as e:
        return [line.removeprefix("to").lstrip(".: ") for line in e.errors]
    return []


def _check(word: str, wanted: Wanted) -> None:
    """Some conversion leads to the word and takes the fields."""
    ends = {name.partition("_to_")[2] for name in registry.names("conversion")}
    if wanted.word not in ends:
        known = sorted(ends | SHORT.keys())
        raise SpecError([f"to: nothing converts to {word!r}{registry.nearest(word, known)}; there are {', '.join(known)}"])
    errors: list[str] = []
    for name in (n for n in registry.names("conversion") if n.endswith(f"_to_{wanted.word}")):
        try:
            load(Conversion, {"name": name, **wanted.fields}, place="to")
            return
        except SpecError as e:
            errors += e.errors
    raise SpecError(dict.fromkeys(errors))


def plan(spec: ModelSpec, to: To) -> Plan:
    """What ``convert`` would do, from the declaration alone. Raises what it raises."""
    wanted, width = read(to), spec.width
    moves = {path: move for path, site in _sites(spec) if (move := _move(path, site, wanted, len(spec.layers)))}
    if not moves:
        raise ConversionError(_nothing(spec, wanted))
    new = {path: _target(path, site, moves[path], width) if path in moves else site for path, site in _sites(spec)}
    context = next(iter(moves.values())).context(spec)
    layers = tuple(new[f"layers.{i}"] for i in range(len(spec.layers)))
    planned = dataclasses.replace(spec, embed=new["embed"], layers=layers, context=context)
    problems = check(planned)
    if problems:
        raise SpecError(problems)
    return Plan(moves, planned)


def _sites(spec: ModelSpec) -> Iterator[tuple[str, Spec]]:
    yield "embed", spec.embed
    yield from ((f"layers.{i}", layer) for i, layer in enumerate(spec.layers))


def _move(path: str, site: Spec, wanted: Wanted, layers: int) -> Conversion | None:
    known = registry.names("conversion")
    for place, part in _parts(site):
        name = f"{part.name}_to_{wanted.word}"
        if name in known and wanted.takes(f"{path}.{place}", layers):
            return load(Conversion, {"name": name, **wanted.fields}, place="to")
    return None


def _parts(site: Spec) -> Iterator[tuple[str, Spec]]:
    """The parts of a site that a conversion may start from, with their places in it."""
    for place in PLACES:
        part = reduce(lambda at, name: getattr(at, name, None), place.split("."), site)
        if isinstance(part, Spec):
            yield place, part


def _target(path: str, site: Spec, move: Conversion, width: int) -> Spec:
    try:
        return move.target(site, width)
    except ConversionError as e:
        raise ConversionError(f"{path}: {e}") from None


def _nothing(spec: ModelSpec, wanted: Wanted) -> str:
    here = {part.name for _, site in _sites(spec) for _, part in _parts(site)}
    reachable = sorted(name.replace("_to_", " to ") for name in registry.names("conversion") if name.partition("_to_")[0] in here)
    where = f"at {wanted.where}" if wanted.where else "in this model"
    return f"nothing {where} converts to {wanted.word!r}; the model has {', '.join(sorted(here))}. Reachable: {', '.join(reachable)}"


# ---- the work ----------------------------------------------------------------------------------------------------------------


def convert(model: Model, to: To, *, ids: Tensor | None = None) -> tuple[Model, Report]:
    """A new model whose parts are of the kind ``to`` wherever a conversion leads there; the old one is left as it is.

    Tensors that do not change are shared with the old model.

    to: the name of a part (``latent``), a short name (``mha``, ``mqa``, ``mla``, ``half``, ``interleaved``), a mapping with ``name``
    and the conversion's fields ({name: latent, rank: 64}), or a one-line edit that also says where
    (``layers.0:8.mixer.projection={name: mla, rank: 64}``). ids: [B, T] int64 tokens of calibration text; conversions that lose
    something then lose what such text needs least. Converted linear parts are dense and of the model's dtype.

    Raises SpecError for what is no conversion, ConversionError where no part can be converted or one cannot, before any work.
    """
    model.check_whole("converting")
    moves, spec = plan(model.spec, to)
    old, new = dict(_sites(model.spec)), dict(_sites(spec))
    needed = [path for path, move in moves.items() if move.calibrated]
    moments = second_moments(model, ids, needed) if ids is not None else {}
    state, rows = model.state_dict(), []
    for path, move in moves.items():
        done = move.convert(Work(path, old[path], new[path], dense_tensors(model.get_submodule(path)), moments.get(path)))
        state = exchange(state, f"{path}.", done.tensors, spec, model.dtype)
        rows.append(Row(path, move.name, done.exact, done.error, done.lost))
    return rebuilt(model, spec, state), Report(rows)


def unpacked(spec: S) -> S:
    """The spec with dense linear parts."""
    return transform(spec, lambda part: load(Linear, "dense") if isinstance(part, Linear) else part)


def dense_tensors(site: nn.Module) -> Tensors:
    """A layer's or the embedding's tensors in float32, stored linear modules as the matrices that they stand for."""
    found = dict(site.state_dict())
    for path, module in site.named_modules():
        if isinstance(module, StoredLinear):
            for name in module.canonical():
                found.pop(f"{path}.{name}")
            found[f"{path}.weight"] = module.dense_weight(torch.float32)  # pyright: ignore[reportCallIssue]
            if module.bias is not None:
                found[f"{path}.bias"] = module.bias
    return {name: tensor.detach().float() for name, tensor in found.items()}


def exchange(state: Tensors, prefix: str, new: Tensors, spec: ModelSpec, dtype: torch.dtype) -> Tensors:
    """The state with one site's new tensors in, in the dtype that each is held in, and without those that it no longer has."""
    tensors = spec.tensors()
    kinds = {name: getattr(torch, info.dtype) if info.dtype else dtype for name, info in tensors.items()}
    changed = {prefix + name: tensor.to(kinds[prefix + name]).contiguous() for name, tensor in new.items()}
    return {n: t for n, t in state.items() if not n.startswith(prefix) or n in tensors} | changed


def rebuilt(model: Model, spec: ModelSpec, state: Tensors) -> Model:
    """A model of ``spec`` with these tensors."""
    with unfilled():
        new = spec.build()
    new.load_state_dict(state, assign=True)
    new.requires_grad_(any(p.requires_grad for p in model.parameters()))  # loaded models are frozen
    finish(new, "")
    new.config, new.source = model.config, model.source and dataclasses.replace(model.source, table=[])
    return new.eval()


@torch.no_grad()
def second_moments(model: Model, ids: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """Mean x x^T [M, M] float64 of the inputs of the key projection of each layer, by path."""
    sums = {path: torch.zeros(model.spec.width, model.spec.width, dtype=torch.float64) for path in layers}

    def adder(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            flat = args[0].flatten(0, -2).cpu().double()
            sums[path] += flat.T @ flat

        return add

    with ExitStack() as stack:
        for path in layers:
            keys = model.get_submodule(f"{path}.mixer.projection.k")
            stack.callback(keys.register_forward_pre_hook(adder(path)).remove)
        for row in ids.split(1):
            model(row.to(model.device))
    return {path: total / ids.numel() for path, total in sums.items()}


def relative(new: Tensor, old: Tensor) -> float:
    """Frobenius distance over the norm of ``old``; 0 where nothing differs, as between biases that are all 0."""
    distance = (new - old).norm()
    return float(distance / old.norm()) if distance else 0.0
