"""Typed, declarative specs: frozen keyword-only dataclasses that YAML is data for.

A spec says what a part is; ``build`` makes the module. Specs nest, so one spec is a whole model, and everything that can be
known without building it (parameters, bytes, cache size, mistakes) is computed from the tree. Loading and checking report all
errors at once, each with its place in the tree, the reason and the nearest valid word.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, TypeVar

from zoo.components import registry
from zoo.components.cost import Call, TensorInfo
from zoo.components.repeats import rolled, unrolled

S = TypeVar("S", bound="Spec")


class SpecError(ValueError):
    """One or more mistakes in a spec; ``errors`` lists them as ``place: reason`` lines."""

    def __init__(self, errors: Iterable[str]):
        self.errors = list(errors)
        super().__init__("\n".join(self.errors))


@dataclass(frozen=True)
class Child:
    """A part inside a part: its spec and the arguments (sizes) that its owner builds it with."""

    spec: Spec
    at: tuple[Any, ...] = ()

    def build(self) -> Any:
        return self.spec.build(*self.at)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Base of every spec. ``family`` is the axis it belongs to ("" for plain records), ``name`` its word within the axis.

    ``at`` below stands for the family's build arguments, the sizes that the owner decides (see contracts).
    """

    family: ClassVar[str] = ""
    name: ClassVar[str] = ""

    @cached_property
    def key(self) -> str:
        """A string that equal specs share, worked out once; what one forward call shares between layers is filed under it."""
        return repr(self)

    def build(self, *at: Any) -> Any:
        """The module that this spec describes."""
        raise NotImplementedError(f"{type(self).__name__} has no build")

    def children(self, *at: Any) -> dict[str, Child]:
        """The parts inside this one under the names that they have as submodules."""
        return {}

    def own_tensors(self, *at: Any) -> dict[str, TensorInfo]:
        """Tensors held directly, not through a child."""
        return {}

    def tensors(self, *at: Any) -> dict[str, TensorInfo]:
        """Every parameter and stored buffer below this spec, as the built module will name them."""
        own = self.own_tensors(*at)
        return own | {f"{n}.{k}": t for n, c in self.children(*at).items() for k, t in c.spec.tensors(*c.at).items()}

    def flops(self, call: Call, *at: Any) -> float:
        """Floating-point operations of one row's call in matrix products, a multiplication and an addition each counting as one.

        What only grows with the width (norms, activations, rotations, a softmax) is not counted.
        """
        return sum(c.spec.flops(call, *c.at) for c in self.children(*at).values())

    def bytes_read(self, call: Call, element_bytes: int, *at: Any) -> float:
        """Bytes of weights that one row's call has to read, each once. element_bytes: of the model's dtype."""
        own = sum(t.bytes(element_bytes) for t in self.own_tensors(*at).values())
        return own + sum(c.spec.bytes_read(call, element_bytes, *c.at) for c in self.children(*at).values())

    def problems(self, *at: Any) -> Iterator[tuple[str, str]]:
        """(field or child name, reason) for each mistake that types alone do not catch. Children are asked separately."""
        return iter(())


def check(spec: Spec, *at: Any, place: str = "") -> list[str]:
    """All semantic mistakes in a spec tree, as ``place: reason`` lines."""
    try:
        found = [f"{_join(place, where)}: {why}" for where, why in spec.problems(*at)]
        children = {} if found else spec.children(*at)
    except SpecError as e:
        return [f"{place}: {line}" for line in e.errors]
    return found + [line for n, c in children.items() for line in check(c.spec, *c.at, place=_join(place, n))]


# ---- plain data -> spec ------------------------------------------------------------------------------------------------------


def load(cls: type[S], data: Any, place: str = "") -> S:
    """Plain data (from YAML, JSON or Python) -> a spec of class or family ``cls``.

    A bare word is the part of that name with its defaults. Raises SpecError with every mistake found.
    """
    errors: list[str] = []
    spec = _load(cls, data, place, errors)
    if errors:
        raise SpecError(errors)
    return spec


def _load(cls: type[Spec], data: Any, place: str, errors: list[str]) -> Any:
    if isinstance(data, cls):
        return data
    if isinstance(data, str):
        data = {"name": data}
    if not isinstance(data, Mapping):
        return errors.append(f"{place or '<root>'}: expected {_title(cls)} (a name or a mapping), got {data!r}")
    data = dict(data)
    if cls.family and not cls.name:  # a family: the word says which part
        word = data.pop("name", None)
        try:
            cls = registry.get(cls.family, str(word)).spec
        except registry.RegistryError as e:
            return errors.append(f"{place or '<root>'}: {e}")
    elif cls.name:
        data.pop("name", None)
    return _fields(cls, data, place, errors)


def _fields(cls: type[Spec], data: dict[str, Any], place: str, errors: list[str]) -> Any:
    hints, known = _hints(cls), {f.name: f for f in fields(cls)}
    before = len(errors)
    for key in data.keys() - known.keys():
        errors.append(f"{_join(place, key)}: {_title(cls)} has no such field{registry.nearest(str(key), known)}")
    for f in known.values():
        if f.name not in data and f.default is MISSING and f.default_factory is MISSING:
            errors.append(f"{_join(place, f.name)}: missing; {_title(cls)} needs it")
    values = {k: _value(hints[k], data[k], _join(place, k), errors) for k in data if k in known}
    return cls(**values) if len(errors) == before else None


def _value(hint: Any, value: Any, place: str, errors: list[str]) -> Any:
    if isinstance(hint, type) and issubclass(hint, Spec):
        return _load(hint, value, place, errors)
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and any(_is_spec(a) for a in args):
        return None if value is None else _value(next(a for a in args if a is not types.NoneType), value, place, errors)
    if typing.get_origin(hint) is tuple and _is_spec(args[0]):
        if not isinstance(value, (list, tuple)):
            return errors.append(f"{place}: expected a list, got {value!r}")
        items = unrolled(value, place, errors)
        return tuple(_once(items, lambda item, i: _value(args[0], item, _join(place, str(i)), errors)))
    return _leaf(hint, value, place, errors)


def _once(items: Sequence[Any], make: Callable[[Any, int], Any]) -> Iterator[Any]:
    """``make(item, index)`` of each; copies of one object share what is made of it, for a model may have 20,000 experts."""
    made: dict[int, Any] = {}
    for i, item in enumerate(items):
        if made.get(id(item)) is None:  # what has mistakes is looked at again in every place
            made[id(item)] = make(item, i)
        yield made[id(item)]


def _leaf(hint: Any, value: Any, place: str, errors: list[str]) -> Any:
    from pydantic import ValidationError

    lax = "float" in str(hint) and not isinstance(value, bool)  # PyYAML reads 1e6 as a string; let floats accept it
    try:
        return _adapter(hint).validate_python(tuple(value) if isinstance(value, list) else value, strict=not lax)
    except ValidationError as e:
        errors.extend(f"{_join(place, *map(str, x['loc']))}: {x['msg'].lower()}, got {x['input']!r}" for x in e.errors())


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


def default(family: type[S], word: str) -> Any:
    """A dataclass field whose default is the part ``word`` of ``family``, looked up when first needed."""
    return dataclasses.field(default_factory=lambda: load(family, word))


# ---- spec -> plain data ------------------------------------------------------------------------------------------------------


def dump(spec: Any) -> Any:
    """Spec -> plain data with defaults left out, so two specs differ exactly where their dumps differ."""
    if isinstance(spec, tuple):
        return rolled([dump(x) for x in spec]) if any(isinstance(x, Spec) for x in spec) else [dump(x) for x in spec]
    if not isinstance(spec, Spec):
        return spec
    out = {"name": spec.name} if spec.name else {}
    for f in fields(spec):
        value = getattr(spec, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if value != default:
            out[f.name] = dump(value)
    return out["name"] if list(out) == ["name"] else out


def flat(spec: Any, place: str = "") -> dict[str, Any]:
    """Every leaf of a spec under its dotted path, part names included; the raw material of ``diff``."""
    if isinstance(spec, tuple) and any(isinstance(x, Spec) for x in spec):
        return {k: v for i, x in enumerate(spec) for k, v in flat(x, _join(place, str(i))).items()}
    if not isinstance(spec, Spec):
        return {place: spec}
    own = {place: spec.name} if spec.name else {}
    return own | {k: v for f in fields(spec) for k, v in flat(getattr(spec, f.name), _join(place, f.name)).items()}


def diff(a: Spec, b: Spec) -> list[tuple[str, Any, Any]]:
    """(path, value in a, value in b) for each leaf that differs; None where one side lacks the path."""
    left, right = ({}, {}) if a == b else (flat(a), flat(b))
    return [(k, left.get(k), right.get(k)) for k in {**left, **right} if left.get(k) != right.get(k)]


def compact(rows: Iterable[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    """The rows of ``diff`` with those that say the same of several layers in one: ``layers.0:32.mixer.kernel``."""
    groups: dict[tuple[str, str, Any, Any], list[int]] = {}
    for path, left, right in rows:
        found = re.match(r"(.*?\.)(\d+)(\..*|$)", path)
        head, number, tail = found.groups() if found else (path, "", "")
        groups.setdefault((head, tail, left, right), []).extend([int(number)] if number else [])
    return [(head + (indices(where) if where else "") + tail, left, right) for (head, tail, left, right), where in groups.items()]


def indices(where: Sequence[int]) -> str:
    """Ascending indices as an override path writes them: ``3``, the slice ``0:32:2``, or ``[0,3,4]`` where they are no slice."""
    if len(where) == 1:
        return str(where[0])
    step = where[1] - where[0]
    if list(where) != list(range(where[0], where[-1] + 1, step)):
        return f"[{','.join(map(str, where))}]"
    return f"{where[0]}:{where[-1] + 1}" + (f":{step}" if step > 1 else "")


def transform(spec: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a spec tree in which every spec, inner ones first, is replaced by ``change(spec)``."""
    if isinstance(spec, tuple):
        return tuple(_once(spec, lambda x, _: transform(x, change)))
    if not isinstance(spec, Spec):
        return spec
    return change(dataclasses.replace(spec, **{f.name: transform(getattr(spec, f.name), change) for f in fields(spec)}))


# ---- one-line edits ----------------------------------------------------------------------------------------------------------


def override(spec: S, *edits: str) -> S:
    """Edit by path: ``layers.*.mixer.kernel=eager`` swaps a part (its old fields go with it), ``layers.3.mixer.position.theta=1e6``
    edits one field. Path steps are names, globs, indices (negative too), lists of them (``[0,2]``) and
    slices (``1::2``); the value is YAML.

    Raises SpecError for a path that matches nothing and for values that do not fit, all at once.
    """
    errors: list[str] = []
    for edit in edits:
        path, eq, raw = edit.partition("=")
        if not eq:
            errors.append(f"{edit}: an override is written path=value")
            continue
        hits: list[str] = []
        misses: list[str] = []
        spec = _edit(spec, path.strip().split("."), read_value(raw), "", hits, misses, errors)
        if not hits:
            errors.append(misses[0] if misses else f"{path}: matches nothing")
    if errors:
        raise SpecError(dict.fromkeys(errors))
    return spec


def read_value(raw: str) -> Any:
    """A value written as YAML on one line. Raises SpecError."""
    import yaml

    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError as e:
        raise SpecError([f"{raw}: the value is not YAML ({str(e).splitlines()[0]})"]) from None


def _edit(node: Any, path: list[str], value: Any, place: str, hits: list[str], misses: list[str], errors: list[str]) -> Any:
    if isinstance(node, tuple):
        picked = [picks(path[0], i, len(node)) for i in range(len(node))]
        if not any(picked):
            misses.append(f"{_join(place, path[0])}: matches none of the {len(node)} entries of {place}")
        step = [_edit(x, path[1:], value, _join(place, str(i)), hits, misses, errors) if on else x
                for i, (x, on) in enumerate(zip(node, picked, strict=True))]  # fmt: skip
        return tuple(step)
    if not path:
        hits.append(place)
        if isinstance(node, Spec):
            return _load(_family_of(node), value, place, errors) or node
        errors.append(f"{place}: one entry of a list of plain values cannot be set alone; set the whole list")
        return node
    if not isinstance(node, Spec):
        misses.append(f"{_join(place, path[0])}: {place} is {node!r} and holds no fields")
        return node
    known = [f.name for f in fields(node)]
    chosen = [n for n in known if fnmatch.fnmatchcase(n, path[0])]
    if not chosen:
        misses.append(f"{_join(place, path[0])}: {_title(type(node))} has no such field{registry.nearest(path[0], known)}")
    new = {n: _edit_field(node, n, path[1:], value, _join(place, n), hits, misses, errors) for n in chosen}
    return dataclasses.replace(node, **new)


def _edit_field(node: Spec, name: str, rest: list[str], value: Any, place: str, hits: list, misses: list, errors: list) -> Any:
    old = getattr(node, name)
    if rest:
        return _edit(old, rest, value, place, hits, misses, errors)
    hits.append(place)
    before = len(errors)
    new = _value(_hints(type(node))[name], value, place, errors)
    return new if len(errors) == before else old


def picks(pattern: str, i: int, n: int) -> bool:
    """Whether one step of a path takes entry ``i`` of ``n``: a glob, an index, a list of them or a slice."""
    if ":" in pattern and re.fullmatch(r"-?\d*:-?\d*(:-?\d*)?", pattern):
        return i in range(n)[slice(*(int(x) if x else None for x in pattern.split(":")))]
    if re.fullmatch(r"\[-?\d+(,-?\d+)*\]", pattern):
        return any(picks(one, i, n) for one in pattern[1:-1].split(","))
    if re.fullmatch(r"-?\d+", pattern):
        return int(pattern) in (i, i - n)
    return fnmatch.fnmatchcase(str(i), pattern)


# ---- small helpers -----------------------------------------------------------------------------------------------------------


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _is_spec(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint) and issubclass(hint, Spec)


def _family_of(node: Spec) -> type[Spec]:
    """The class that a replacement must belong to: the family's base, or the node's own class where it has no family."""
    bases = [c for c in type(node).__mro__ if issubclass(c, Spec) and c.family == node.family and not c.name and c is not Spec]
    return bases[-1] if node.family and bases else type(node)


def _title(cls: type[Spec]) -> str:
    return f"{cls.family} {cls.name}".strip() or cls.__name__


def _join(*place: str) -> str:
    return ".".join(p for p in place if p)
