"""Choosing among the implementations of an operator, which are parts of one family with a ``rank`` and a ``refuses``."""

from __future__ import annotations

from typing import Any, TypeVar

from zoo.components import registry
from zoo.components.spec import Spec

S = TypeVar("S", bound=Spec)


def fastest(kind: type[S], wanted: S | None, *ask: Any) -> S:
    """``wanted``, or for None the implementation of highest rank that does not refuse ``ask``, the arguments of its ``refuses``.

    Raises ValueError with the reasons of one that was named and refuses.
    """
    if wanted is None:
        known: list[Any] = [part.spec() for part in registry.parts(kind.family)]  # type: ignore[attr-defined] (each family names itself)
        return next(m for m in sorted(known, key=lambda m: -m.rank) if not m.refuses(*ask))
    named: Any = wanted
    reasons = named.refuses(*ask)
    if reasons:
        raise ValueError(f"{named.family} {named.name} {' and '.join(reasons)}; leave matmul out for the fastest that accepts")
    return wanted
