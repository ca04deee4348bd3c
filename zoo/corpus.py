"""English prose that ships with Python, for calibration and tests on machines without a network.

``pydoc_data.topics`` is the language reference as plain text. Its topics are dealt out to test or calibration; they quote each
other, so every paragraph of the calibration topics that shares a line with the test text is left out: the two never overlap.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Literal

SOURCE = "pydoc_data.topics (the Python language reference)"
TEST_SHARE = 3  # one topic in so many is test text
LONG = 40  # shorter lines (headings, signatures) are shared by chance


@cache
def text(split: Literal["calibration", "test"]) -> str:
    """The text of a split: its topics, sorted by name, joined by blank lines."""
    test = "\n\n".join(body for body in _topics() if _is_test(body))
    if split == "test":
        return test
    taken = {line for line in map(str.strip, test.splitlines()) if len(line) >= LONG}
    rest = "\n\n".join(body for body in _topics() if not _is_test(body))
    return "\n\n".join(p for p in rest.split("\n\n") if taken.isdisjoint(map(str.strip, p.splitlines())))


@cache
def _topics() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    return tuple(dict.fromkeys(topics[name].strip() for name in sorted(topics)))  # several names may share one body


def _is_test(body: str) -> bool:
    return hashlib.sha256(body[:60].encode()).digest()[0] % TEST_SHARE == 0
