"""The catalogue of parts as Markdown, made from the registry: ``python -m zoo.catalogue docs/parts.md``."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

from zoo.components import registry
from zoo.components.registry import Part
from zoo.components.spec import Spec, dump
from zoo.declare import parts

INTRO = """# Parts

Every part that the registry knows, by family. Made from the registry by `python -m zoo.catalogue docs/parts.md`; do not edit.
A part is named in a spec by its word (`kernel: sdpa`) or with its options (`pattern: {name: window, size: 1024}`).
"""


def catalogue() -> str:
    """All families and parts, with source, options and what each needs."""
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
    table = "\n\n| option | type | default |\n| --- | --- | --- |\n" + "\n".join(options) if options else ""
    return f"### `{part.name}`\n\n{doc}\n\nSource: {part.source}.{needs}{table}\n"


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
