"""Which module a config group is about."""

from __future__ import annotations

from collections.abc import Iterable

from zoo.formats import expression


def match(module: str, targets: Iterable[str], place: str) -> str | None:
    """The target that holds for a linear module: its whole name, else the first expression (``re:``) in order, else its class."""
    ordered = sorted(targets, key=lambda target: (target.startswith("re:"), target))
    by_name = (t for t in ordered if t == module or (t.startswith("re:") and expression(t[3:], module, place)))
    return next(by_name, "Linear" if "Linear" in ordered else None)
