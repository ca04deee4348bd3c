"""Which module is quantized how: one method for all, and rules that differ for some.

A rule is ``pattern=value``. The pattern is a glob over module paths (``layers.*.mlp.down``) or names on disk
(``model.layers.*.mlp.down_proj``). The value is YAML: ``keep``, or settings such as ``{bits: 8}`` and ``{name: rtn}`` on top of
those that held so far. Later rules win.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import yaml

from zoo.components import registry
from zoo.components.spec import Child, SpecError, check, dump, load
from zoo.model import ModelSpec
from zoo.quantize.contracts import Quantizer
from zoo.weights import linears

KEEP = "keep"
KEPT = ("embed.*", "head.*", "*router*")  # by default; a rule may quantize them all the same

Settings = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """settings None: the module is kept as it is."""

    text: str
    pattern: str
    settings: Settings | None

    def matches(self, *names: str | None) -> bool:
        return any(name is not None and fnmatch.fnmatchcase(name, self.pattern) for name in names)


def quantizer(method: str | Quantizer, options: Mapping[str, Any]) -> Quantizer:
    """A checked method by name and options. Raises SpecError with the nearest word for each mistake."""
    return _checked(load(Quantizer, _named(method) | dict(options)))


def plan(spec: ModelSpec, method: Quantizer, rules: Sequence[str], names: Mapping[str, str]) -> dict[str, Quantizer]:
    """The quantizer of every module that is quantized, by module path, in the order of the model.

    names: module path -> name on disk, for patterns. Raises ValueError, before any work, for rules that match nothing or do not
    parse, and for modules that cannot be quantized as asked: all of them, by name.
    """
    base = _named(method)
    parsed = [parse(rule, base) for rule in rules]
    modules = dict(linears(spec))
    _check_matches(parsed, modules, names)
    settings = {path: _settings(path, names.get(path), base, parsed) for path in modules}
    chosen = {path: load(Quantizer, s) for path, s in settings.items() if s is not None}
    if not chosen:
        raise ValueError("nothing to quantize: every module is kept")
    _check_modules(spec, modules, chosen)
    return chosen


def parse(text: str, base: Settings) -> Rule:
    """One rule, its settings checked on top of ``base``."""
    pattern, equals, raw = text.partition("=")
    if not equals or not pattern.strip():
        raise ValueError(f"rule {text!r}: write pattern=keep or pattern={{bits: 8}}")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as e:
        raise ValueError(f"rule {text!r}: the value is not YAML ({' '.join(str(e).split())})") from None
    if value == KEEP:
        return Rule(text, pattern.strip(), None)
    if not isinstance(value, dict):
        raise ValueError(f"rule {text!r}: the value is keep or settings in braces, as {{bits: 8}} or {{name: rtn}}, not {value!r}")
    _checked(load(Quantizer, merge(base, value), place=f"rule {text!r}"))
    return Rule(text, pattern.strip(), value)


def merge(settings: Settings, new: Settings) -> Settings:
    """``new`` on top of ``settings``; another method takes over the settings that it has too."""
    if new.get("name", settings["name"]) == settings["name"]:
        return settings | new
    known = {f.name for f in fields(registry.get(Quantizer.family, new["name"]).spec)} if isinstance(new["name"], str) else set()
    return {k: v for k, v in settings.items() if k in known} | new


def _settings(path: str, name: str | None, base: Settings, rules: Sequence[Rule]) -> Settings | None:
    settings = None if any(fnmatch.fnmatchcase(path, pattern) for pattern in KEPT) else base
    for rule in rules:
        if rule.matches(path, name):
            settings = None if rule.settings is None else merge(settings or base, rule.settings)
    return settings


def _named(method: str | Quantizer) -> Settings:
    found = method if isinstance(method, str) else dump(method)
    return {"name": found} if isinstance(found, str) else found


def _checked(method: Quantizer) -> Quantizer:
    problems = check(method)
    if problems:
        raise SpecError(problems)
    return method


def _check_matches(rules: Sequence[Rule], modules: Mapping[str, Child], names: Mapping[str, str]) -> None:
    known = [*modules, *(names[path] for path in modules if path in names)]
    lost = [rule for rule in rules if not any(rule.matches(name) for name in known)]
    if lost:
        lines = [f"rule {rule.text!r} matches no module; near are {', '.join(_near(rule.pattern, known))}" for rule in lost]
        raise ValueError("\n".join(lines))


def _near(pattern: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(pattern, known, 3, 0.3) or list(known[:3])


def _check_modules(spec: ModelSpec, modules: Mapping[str, Child], chosen: Mapping[str, Quantizer]) -> None:
    problems = [line for path, method in chosen.items() for line in _problems(spec, path, modules[path], method)]
    if problems:
        raise ValueError(
            f"{len(problems)} modules cannot be quantized as asked:\n  " + "\n  ".join(problems) + "\n"
            "Keep them by a rule ('*.mlp.down=keep'), give them other settings ('*.mlp.down={group_size: 32}'; group_size: null is one "
            "scale per output), or change the settings of all"
        )


def _problems(spec: ModelSpec, path: str, child: Child, method: Quantizer) -> Iterator[str]:
    tie = spec.head.tie()
    if tie and f"{path}.weight" == f"head.{tie[0]}":
        yield f"{path}: the head is tied to the embedding, which stays as it is"
    elif child.spec.name != "dense":
        yield f"{path}: is quantized already ({child.spec.name})"
    yield from check(method.storage, *child.at, place=path)
