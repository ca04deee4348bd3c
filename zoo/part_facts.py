"""What can be found out about a registered part by asking its spec: facts, limits, whom it refuses, what it costs."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from zoo.components import registry
from zoo.components.contracts import CachePolicy, Call, Embed, Experts, Kernel, Pattern, Projection
from zoo.components.registry import Part
from zoo.components.spec import Spec, SpecError, check, load
from zoo.model import MixerSpec

WIDTH, VOCAB, EXPERTS = 64, 256, 4  # the model around an example
PROMPT = 128  # tokens
BYTES = torch.bfloat16.itemsize
PLAIN = {"projection": "gqa", "position": "rope", "pattern": "causal", "kernel": "eager"}
ODD_VALUES = (-1, 10_007)  # too small, and a prime that divides nothing


# ---- facts and limits --------------------------------------------------------------------------------------------------------


def facts(part: Part) -> list[str]:
    """The family's class facts in which the part differs from the family's default, e.g. ``softmax`` or ``rounding 0.03``."""
    spec, base = part.small(), _base(part)
    named = [n for c in base.__mro__ for n, kind in vars(c).get("__annotations__", {}).items() if str(kind).startswith("ClassVar")]
    values = {n: (getattr(spec, n), getattr(base, n, None)) for n in named if n not in ("family", "name")}
    return [_fact(n, value) for n, (value, usual) in values.items() if value != usual and isinstance(value, (int, float, frozenset))]


def _base(part: Part) -> type[Spec]:
    return [c for c in part.spec.__mro__ if issubclass(c, Spec) and c.family == part.family][-1]


def _fact(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return f"{name} {', '.join(sorted(value)) if isinstance(value, frozenset) else value}"


def limits(part: Part) -> dict[str, list[str]]:
    """Field -> why values are refused, found by giving each number of the example values that are rarely right."""
    small, at = part.small(), arguments(part)
    found: dict[str, list[str]] = {}
    for field in dataclasses.fields(small):
        if type(getattr(small, field.name)) in (int, float):
            why = dict.fromkeys(_without_value(w, odd) for odd in ODD_VALUES for w in _complaints(small, field.name, odd, at))
            found |= {field.name: list(why)} if why else {}
    return found


def _complaints(small: Spec, field: str, value: int, at: tuple[Any, ...]) -> list[str]:
    return [why for where, why in dataclasses.replace(small, **{field: value}).problems(*at) if where == field]


def _without_value(reason: str, value: int) -> str:
    return re.sub(r", got .*", "", reason).replace(str(value), "N")


# ---- whom a part of the mixer refuses ----------------------------------------------------------------------------------------


def refusals(part: Part) -> list[str]:
    """``axis names: reason`` lines, found by asking: for kernels and caches what they refuse, for other mixer parts by which kernels."""
    if part.family == "cache":
        return _grouped(_cache_refusals(part.small()))  # pyright: ignore[reportArgumentType]
    return _grouped(_mixer_refusals(part)) if part.family in PLAIN else []


def _mixer_refusals(part: Part) -> Iterator[tuple[str, str, str]]:
    """A kernel with every other part, another part with every kernel: in the plainest mixer of the kernel, so that nothing else is new."""
    for kernel in [part] if part.family == "kernel" else registry.parts("kernel"):
        for other in [p for a in PLAIN if a != "kernel" for p in registry.parts(a)] if kernel == part else [part]:
            base = mixer("kernel", kernel.name)
            met = other if kernel == part else kernel
            reasons = _reasons(dataclasses.replace(base, **{other.family: other.small()})) if base else []
            yield from ((met.family, met.name, reason) for reason in reasons)


def _cache_refusals(policy: CachePolicy) -> Iterator[tuple[str, str, str]]:
    for axis in PLAIN:
        for other in registry.parts(axis):
            found = mixer(axis, other.name)
            reasons = policy.refuses(found.ask) if found and found.pattern.causal else []
            yield from ((axis, other.name, reason) for reason in reasons)


def _reasons(spec: MixerSpec) -> list[str]:
    lines = check(spec, WIDTH, 0)
    return [line.partition(": ")[2].removeprefix(f"{spec.kernel.name} ") for line in lines]


def _grouped(rows: Iterator[tuple[str, str, str]]) -> list[str]:
    """Parts of one axis that are refused for one reason share a line; a reason that names its part is said once for all."""
    groups: dict[tuple[str, str], list[str]] = {}
    for axis, name, reason in rows:
        said = re.sub(rf"\b{name}\b", "this one", reason.replace(f"{axis} {name}", f"this {axis}"))
        groups.setdefault((axis, said), []).append(name)
    return [f"{axis} {_listed(axis, names)}: {reason}" for (axis, reason), names in groups.items()]


def _listed(axis: str, names: list[str]) -> str:
    others = [n for n in registry.names(axis) if n not in names]
    return f"(all but {', '.join(others)})" if axis == "kernel" and 0 < len(others) < len(names) else ", ".join(names)


@cache
def mixer(axis: str, name: str) -> MixerSpec | None:
    """The plainest mixer with this part, of the registry's examples; None where no other parts go with it."""
    free = [a for a in PLAIN if a != axis]
    options = {a: sorted(registry.names(a), key=lambda n, a=a: (n != PLAIN[a], n)) for a in free}
    ranked = sorted(itertools.product(*options.values()), key=lambda o: sum(n != PLAIN[a] for a, n in zip(free, o, strict=True)))
    for choice in ranked:
        words = {axis: name, **dict(zip(free, choice, strict=True))}
        spec = MixerSpec(**{a: registry.get(a, n).small() for a, n in words.items()})  # pyright: ignore[reportArgumentType]
        if not check(spec, WIDTH, 0):
            return spec
    return None


# ---- costs -------------------------------------------------------------------------------------------------------------------


def arguments(part: Part) -> tuple[Any, ...]:
    """The build arguments of an example, sizes as in ``WIDTH``, ``VOCAB`` and ``EXPERTS``."""
    found = mixer("kernel", part.name) if part.family == "kernel" else None
    experts = tuple(registry.get("mlp", "gated").small() for _ in range(EXPERTS))
    sizes: dict[str, tuple[Any, ...]] = {
        "linear": (WIDTH, WIDTH, False),
        "position": (8, 4),
        "rope_scaling": (8,),
        "kernel": (found.projection if found else load(Projection, {"name": "gqa", **registry.get("projection", "gqa").example}),),
        "router": (WIDTH, EXPERTS),
        "experts": (experts, WIDTH),
        "head": (WIDTH, load(Embed, {"name": "tokens", "vocab": VOCAB})),
    }
    alone = ("norm", "projection", "mlp", "wiring", "position_embedding", "embed")
    return sizes.get(part.family, (WIDTH,) if part.family in alone else ())


def cost(part: Part) -> str:
    """One sentence on what a token of the part's example costs; empty for families whose parts cost nothing of their own."""
    spec = part.small()
    if isinstance(spec, Pattern):
        pairs = PROMPT * PROMPT
        return f"shows {spec.pairs(Call(PROMPT)):,.0f} of the {pairs:,} pairs of {PROMPT} tokens"
    if isinstance(spec, CachePolicy):
        slots = load(Projection, {"name": "gqa", **registry.get("projection", "gqa").example}).slots()
        plain = sum(s.bytes(BYTES) for s in slots.values())
        return f"keeps {spec.bytes_per_token(slots, BYTES):,} bytes of a token whose keys and values are {plain:,} bytes in bfloat16"
    if isinstance(spec, Experts):
        return f"runs {spec.rows(PROMPT, 2, EXPERTS):,.0f} vectors for {PROMPT} tokens of 2 choices among {EXPERTS} experts"
    return _token_cost(part, spec)


def _token_cost(part: Part, spec: Spec) -> str:
    at = arguments(part)
    if not at:
        return ""
    prompt, one = Call(PROMPT), Call(1, PROMPT - 1)
    if isinstance(spec, Kernel):
        pattern = load(Pattern, "causal")
        prompt, one = (dataclasses.replace(c, shown=pattern.pairs(c)) for c in (prompt, one))
    try:
        flops, last = spec.flops(prompt, *at) / PROMPT, spec.flops(one, *at)
        read = spec.bytes_read(one, BYTES, *at)
    except SpecError:
        return ""
    work = [f"{flops:,.0f} FLOP a token of a prompt", f"{last:,.0f} FLOP to decode one"] if last else []
    return ", ".join([*work, f"{read:,.0f} bytes of weights read to decode one"] if read else work)
