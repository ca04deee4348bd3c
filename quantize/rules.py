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

import torch
import yaml

from zoo.components import registry
from zoo.components.mlp.moe import MoE
from zoo.components.spec import Child, SpecError, check, dump, load
from zoo.model import Model, ModelSpec
from zoo.quantize.contracts import BlockwiseQuantizer, Quantizer
from zoo.weights import linears

KEEP = "keep"
GROUPS = (128, 64, 32, 16)  # sizes to propose, the first that divides
KEPT = ("embed.*", "head.*", "*router*", "*.kv_up", "*.kv_up.*")  # by default; a rule may quantize them all the same

Settings = dict[str, Any]
QuantizerLike = str | Mapping[str, Any] | Quantizer


@dataclass(frozen=True)
class Rule:
    """settings None: the module is kept as it is."""

    text: str
    pattern: str
    settings: Settings | None

    def matches(self, *names: str | None) -> bool:
        return any(name is not None and fnmatch.fnmatchcase(name, self.pattern) for name in names)


def quantizer(method: QuantizerLike, options: Mapping[str, Any]) -> Quantizer:
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
    parsed = [*(parse(rule, base) for rule in method.rules), *parsed]
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


def _named(method: QuantizerLike) -> Settings:
    found = dump(method) if isinstance(method, Quantizer) else method
    return {"name": found} if isinstance(found, str) else dict(found)


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
    found = {path: list(_problems(spec, path, modules[path], method)) for path, method in chosen.items()}
    problems = [line for lines in found.values() for line in lines]
    if problems:
        inputs = [modules[path].at[0] for path, lines in found.items() if lines]
        size = next((size for size in GROUPS if not any(n % size for n in inputs)), "null")
        raise ValueError(
            f"{len(problems)} modules cannot be quantized as asked:\n  " + "\n  ".join(problems) + "\n"
            "Keep them by a rule ('*.mlp.down=keep'), give them other settings "
            f"('*.mlp.down={{group_size: {size}}}'; group_size: null is one scale per output), or change the settings of all"
        )


def _problems(spec: ModelSpec, path: str, child: Child, method: Quantizer) -> Iterator[str]:
    tie = spec.head.tie()
    if tie and f"{path}.weight" == f"head.{tie[0]}":
        yield f"{path}: the head is tied to the embedding, which stays as it is"
    elif child.spec.name != "dense":
        yield f"{path}: is quantized already ({child.spec.name})"
    yield from check(method.storage, *child.at, place=path)


def shared_weights(model: Model, planned: ModelSpec, chosen: Mapping[str, Quantizer]) -> None:
    """Raise ValueError, naming them, for modules to quantize whose weight in memory is another module's too, whatever the spec says.

    planned: the spec to come, in which a head may have a weight of its own.
    """
    tie = model.spec.head.tie()
    freed = f"head.{tie[0]}" if tie and not planned.head.tie() else None
    seen: dict[tuple[int, torch.dtype, torch.Size], list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if not tensor.is_meta and tensor.numel() and name != freed:
            seen.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape), []).append(name)
    shared = [names for names in seen.values() if len(names) > 1 and any(n.removesuffix(".weight") in chosen for n in names)]
    if shared:
        raise ValueError(
            "weights that several modules share cannot be quantized, each would store one of its own:\n  "
            + "\n  ".join(" = ".join(names) for names in shared)
            + "\nKeep all of them by rules, or give each its own copy first"
        )


def check_data(spec: ModelSpec, chosen: Mapping[str, Quantizer], settings: Mapping[str, Any], data: bool) -> None:
    """Raise ValueError for settings that would change nothing, or that the model or its methods cannot follow. data: there is some."""
    one_by_one = [m for m in chosen.values() if not isinstance(m, BlockwiseQuantizer)]
    if settings["true_sequential"] and not data:
        raise ValueError(f"{_named_in(chosen)} uses no data, so true_sequential changes nothing; leave it out, or give calibration")
    if settings["true_sequential"] and not one_by_one:
        raise ValueError(f"{_named_in(chosen)} quantizes the modules of a layer together, so true_sequential changes nothing; leave it out")
    if settings["least_tokens"] < 0:
        raise ValueError(f"least_tokens must not be negative, got {settings['least_tokens']}")
    if settings["all_experts"]:
        _check_all_experts(spec, data)
    beyond = [path for path, m in chosen.items() if isinstance(m, BlockwiseQuantizer) and not path.startswith("layers.")]
    if beyond:
        raise ValueError(f"{', '.join(beyond)}: {_named_in(chosen)} fits layers; give it another method ('head.out={{name: gptq}}')")


def _check_all_experts(spec: ModelSpec, data: bool) -> None:
    mixtures = {f"layers.{i}.mlp": layer.mlp for i, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoE)}
    if not mixtures or not data:
        raise ValueError("all_experts changes nothing: " + ("no data is used" if mixtures else "the model has no experts"))
    for path, mixture in mixtures.items():
        if not mixture.dispatch.exact:
            raise ValueError(f"all_experts: {path}.dispatch {mixture.dispatch.name} drops tokens; take another, as {path}.dispatch=grouped")
        if getattr(mixture.router, "on_input", False):
            raise ValueError(f"all_experts: {path}.router multiplies experts' inputs, and by nothing for tokens that did not choose them")


def _named_in(chosen: Mapping[str, Quantizer]) -> str:
    return " and ".join(dict.fromkeys(method.name for method in chosen.values()))
