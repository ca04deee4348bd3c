"""Checks of what a public function is given, by its own signature."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_type_hints


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise one TypeError that names each of these arguments which is not of the type in a function's signature.

    Types are taken at their word: a bool is no int, nor is 1.0, and a str is no sequence of texts.
    """
    from pydantic import ValidationError

    problems = []
    for name, value in given.items():
        try:
            _adapter(function, name).validate_python(value)
        except ValidationError:
            problems.append(_problem(name, value, get_type_hints(function)[name]))
    if problems:
        raise TypeError("; ".join(problems))


def _problem(name: str, value: Any, hint: Any) -> str:
    wanted = re.sub(r"(\w+\.)+", "", hint.__name__ if isinstance(hint, type) else str(hint))
    lone = isinstance(value, str) and "Sequence[" in wanted
    return f"{name} must be {wanted}, got {reprlib.repr(value)}" + f"; for one write {name}=[{value!r}]" * lone


@cache
def _adapter(function: Callable[..., Any], name: str) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(get_type_hints(function)[name], config=ConfigDict(strict=True, arbitrary_types_allowed=True))
