"""Lists of specs as plain data: what is repeated is written once, as ``{repeat: n, of: [...]}`` or ``{repeat: n, ...fields}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MOST = 100_000  # entries of a list, repeats written out
LONGEST = 512  # entries of a run that is looked for when repeats are rolled up


def unrolled(items: Sequence[Any], place: str, errors: list[str]) -> list[Any]:
    """The list with repeats written out; copies are one object. Mistakes are added to ``errors`` as ``place: reason``.

    ``{repeat: n, of: [...]}`` stands for n copies of a run, ``{repeat: n, ...fields}`` for n copies of one item. At most MOST entries.
    """
    out: list[Any] = []
    for i, item in enumerate(items):
        run, times = [item], 1
        if isinstance(item, Mapping) and "repeat" in item:
            where, times = f"{place}.{i}", item["repeat"]
            rest = {k: v for k, v in item.items() if k != "repeat"}
            if not isinstance(rest.get("of", []), (list, tuple)):
                errors.append(f"{where}.of: expected a list, got {rest['of']!r:.60}")
                continue
            run = unrolled(rest["of"], f"{where}.of", errors) if "of" in rest else [rest]
            if type(times) is not int or not 1 <= times <= MOST:
                errors.append(f"{where}.repeat: must be a whole number in 1..{MOST}, got {times!r:.60}")
                continue
        if len(out) + len(run) * times > MOST:
            errors.append(f"{place}: holds more than {MOST} entries once its repeats are written out")
            return out
        out.extend(run * times)
    return out


def rolled(items: list[Any]) -> list[Any]:
    """Repeated runs become ``{repeat: n, of: [...]}``; at each place the run that covers most is taken, the shortest of equals."""
    out: list[Any] = []
    i, words = 0, [repr(item) for item in items]  # strings are compared faster than trees
    while i < len(items):
        period = _period(words, i)
        times = _repeats(words, i, period)
        out.append({"repeat": times, "of": rolled(items[i : i + period]) if period < len(items) else items} if times > 1 else items[i])
        i += period * times if times > 1 else 1
    return out


def _period(items: Sequence[str], start: int) -> int:
    """The length of the run from ``start`` on whose repeats cover most, at most LONGEST; 1 where nothing is repeated."""
    rest, best, most = len(items) - start, 1, 1
    for period in range(1, min(LONGEST, rest // 2) + 1):
        if items[start + period] != items[start]:
            continue
        times = _repeats(items, start, period)
        if times > 1 and times * period > most:
            best, most = period, times * period
        if most == rest:
            break
    return best


def _repeats(items: Sequence[str], start: int, period: int) -> int:
    """How many times the ``period`` items from ``start`` on are repeated without a gap."""
    run, times = items[start : start + period], 1
    while items[start + times * period : start + (times + 1) * period] == run:
        times += 1
    return times
