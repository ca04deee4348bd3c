"""The registry: every part of the zoo under (family, name), found without importing it.

A family is an axis of choice (``norm``, ``kernel``, ``quantizer``). It names a package whose modules are its parts: the file
``components/norm/rms.py`` holds the part ``norm rms``, so the folder is the lazy index and there is no list to keep. Other
distributions add parts through the entry-point group ``zoo.parts`` (``"kernel.mine" = "their_package.module"``).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from zoo.components.spec import Spec

S = TypeVar("S", bound="type[Spec]")
ENTRY_POINTS = "zoo.parts"


class RegistryError(ValueError):
    """A name that is unknown, registered twice, or whose module does not define it."""


@dataclass(frozen=True)
class Part:
    """One registered part: its spec class and what the catalogue shows of it."""

    family: str
    name: str
    spec: type[Spec]
    source: str
    needs: tuple[str, ...]
    example: Mapping[str, Any]

    def small(self) -> Spec:
        """A small instance, for documentation and for the tests that every part of the family must pass."""
        from zoo.components.spec import load

        return load(self.spec, {"name": self.name, **self.example})

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.spec) or "").partition("\n")[0]


@dataclass(frozen=True)
class Family:
    """An axis of choice. ``package`` holds one module per part; ``about`` is its line in the catalogue."""

    name: str
    package: str
    about: str


_families: dict[str, Family] = {}
_parts: dict[tuple[str, str], Part] = {}


def declare(name: str, package: str, about: str) -> None:
    """Make a family known. Nothing is imported; declaring the same family again is harmless, another package is an error."""
    family = Family(name, package, about)
    if _families.setdefault(name, family) != family:
        raise RegistryError(f"family {name!r} is already declared with package {_families[name].package}, not {package}")


def part(family: type[Spec], name: str, *, source: str = "", needs: Iterable[str] = (),
         example: Mapping[str, Any] | None = None) -> Callable[[S], S]:  # fmt: skip
    """Class decorator: register a spec class as the part ``name`` of ``family`` (the family's base class).

    source: paper and section, or the project that defined the part. needs: what must be there to run it (``"gpu"``, a library).
    example: values for the fields that have no default, small enough for tests.
    Raises RegistryError if the name is taken, naming both classes, and TypeError if the class is not of the family.
    """

    def register(cls: S) -> S:
        if not issubclass(cls, family):
            raise TypeError(f"{_where(cls)} is registered as a {family.family} but does not derive from {family.__name__}")
        known = _parts.get((family.family, name))
        if known and _where(known.spec) != _where(cls):
            raise RegistryError(f"{family.family} {name!r} is defined twice: by {_where(known.spec)} and by {_where(cls)}")
        cls.name = name
        _parts[family.family, name] = Part(family.family, name, cls, source, tuple(needs), dict(example or {}))
        return cls

    return register


def families() -> list[Family]:
    """All declared families, in the order of declaration."""
    return list(_families.values())


def names(family: str) -> list[str]:
    """Every part name of a family, sorted, without importing the parts."""
    found = {n for f, n in _parts if f == family} | set(_modules(family)) | set(_entry_points(family))
    return sorted(found)


def get(family: str, name: str) -> Part:
    """The part, imported on first use. Raises RegistryError with the nearest known names."""
    if (family, name) in _parts:
        return _parts[family, name]
    module = _modules(family).get(name) or _entry_points(family).get(name)
    if module is None:
        raise RegistryError(f"no {family} named {name!r}{nearest(name, names(family))}")
    importlib.import_module(module)
    if (family, name) not in _parts:
        raise RegistryError(f"module {module} does not register the {family} {name!r} that its name promises")
    return _parts[family, name]


def parts(family: str | None = None) -> list[Part]:
    """All parts of one family or of all, imported, sorted by name within each family."""
    chosen = [family_named(family)] if family else families()
    return [get(f.name, n) for f in chosen for n in names(f.name)]


def family_named(name: str) -> Family:
    if name not in _families:
        raise RegistryError(f"no family named {name!r}{nearest(name, _families)}")
    return _families[name]


def nearest(word: str, options: Iterable[str]) -> str:
    """The tail of an error message: ``; did you mean 'x'?`` or the list of what is known."""
    options = sorted(options)
    close = difflib.get_close_matches(word, options, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(options) or 'none'}"


@cache
def _modules(family: str) -> dict[str, str]:
    """Part name -> module, one for every public module in the family's package."""
    if family not in _families:
        return {}
    package = importlib.import_module(_families[family].package)
    return {m.name: f"{package.__name__}.{m.name}" for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")}


@cache
def _entry_points(family: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        owner, _, name = point.name.partition(".")
        if owner != family:
            continue
        if name in _modules(family) or found.get(name, point.value) != point.value:
            other = _modules(family).get(name) or found[name]
            raise RegistryError(f"{family} {name!r} is defined twice: by {other} and by the entry point {point.value}")
        found[name] = point.value
    return found


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
