"""The catalogue of parts as Markdown, made from the registry: ``python -m zoo.catalogue docs/parts.md``."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from pathlib import Path
from typing import Any

import yaml

from zoo.components import registry
from zoo.components.registry import Part
from zoo.components.spec import Spec, dump
from zoo.declare import parts
from zoo.part_facts import PROMPT, WIDTH, cost, facts, limits, refusals

INTRO = f"""# Parts

Every part that the registry knows, by family. Made from the registry by `python -m zoo.catalogue docs/parts.md`; do not edit.
A part is named in a spec by its word (`kernel: sdpa`) or with its options (`pattern: {{name: window, size: 1024}}`).

*Facts* are the family's promises in which a part differs from the family's default; the base class in `zoo.components.contracts`
explains them. *Limits* are the reasons that the part gives for numbers it does not take (N stands for the number). *Refuses* lists
what the part, or for projections, positions and patterns the kernel, answers when each other part is tried beside it. *Costs* are
computed from the spec of the example shown, in a model of width {WIDTH}: operations in matrix products (a multiplication and an
addition are two) of a prompt of {PROMPT} tokens, or of one token after {PROMPT - 1}, causal, in bfloat16.
"""


def catalogue() -> str:
    """All families and parts, with source, options, limits, refusals and costs."""
    found = parts()
    text = [INTRO]
    for family in registry.families():
        mine = [p for p in found if p.family == family.name]
        if mine:
            text.append(f"\n## {family.name}\n\n{family.about[0].upper()}{family.about[1:]}.\n")
            text.extend(_entry(p) for p in mine)
    return "\n".join(text)


def _entry(part: Part) -> str:
    doc = inspect.getdoc(part.spec) or ""
    needs = f" Needs: {', '.join(part.needs)}." if part.needs else ""
    options = [_option(f) for f in dataclasses.fields(part.spec)]
    table = "| option | type | default |\n| --- | --- | --- |\n" + "\n".join(options) if options else ""
    paragraphs = [f"### `{part.name}`", doc, f"Source: {part.source}.{needs}", table, *_found_out(part)]
    return "\n\n".join(p for p in paragraphs if p) + "\n"


def _found_out(part: Part) -> list[str]:
    """Paragraphs that come from asking the part."""
    asked = [f"{field}: {'; '.join(why)}" for field, why in limits(part).items()]
    example = yaml.safe_dump(dump(part.small()), default_flow_style=True, sort_keys=False, width=math.inf).partition("\n")[0]
    costs = cost(part)
    return [
        f"Facts: {', '.join(facts(part))}." if facts(part) else "",
        f"Limits: {'. '.join(asked)}." if asked else "",
        "Refuses:\n\n" + "\n".join(f"* {line}" for line in refusals(part)) if refusals(part) else "",
        f"Costs of `{example}`: {costs}." if costs else "",
    ]


def _option(field: dataclasses.Field[Any]) -> str:
    kind = str(field.type).replace("|", "or")
    return f"| `{field.name}` | {kind} | {_default(field)} |"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value: Any = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    return f"`{dump(value) if isinstance(value, Spec) else value}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(catalogue(), encoding="utf-8")
