"""Words between processes that work for as long as they like.

Each process speaks by a thread of its own, which answers the others every few seconds whether its work has come to an exchange or not.
So a process that works for hours is waited for, and one that has died, or failed, is noticed by all within seconds, whatever they do.
"""

from __future__ import annotations

import datetime as dt
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

PATIENCE = dt.timedelta(minutes=10)  # for an answer, or for bytes in an exchange of tensors; the death of a process is noticed at once
BEAT = 1.0  # seconds between the answers of a process that is at work


class Failed(ConnectionError):
    """Another process failed. The message is its own, and it says it itself."""


class Lost(Failed):
    """Another process has died, or does not answer."""


@dataclass(frozen=True)
class _Word:
    """What a process says in a round. failure: why it leaves; last: that it leaves since all is done."""

    value: Any
    failure: str | None = None
    last: bool = False


class Conversation:
    """The words of a group's processes, all of which make the same exchanges in the same order.

    group: of a backend for the CPU, whose timeout bounds an answer; nothing else may use it.
    """

    def __init__(self, group: dist.ProcessGroup, size: int):
        self._group, self._size = group, size
        self._changed = threading.Condition()
        self._word: _Word | None = None
        self._answers: list[Any] | None = None
        self._ended: Failed | None = None
        self._thread = threading.Thread(target=self._speak, name="conversation", daemon=True)
        self._thread.start()

    def exchange(self, value: Any, last: bool = False) -> list[Any]:
        """What each process gives, in their order, once all have. last: nothing follows. Raises Failed where one has failed or died."""
        with self._changed:
            self._word = _Word(value, None, last)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answers is not None or self._ended is not None)
            answers, self._answers = self._answers, None
        if answers is None:
            self.check()
        assert answers is not None
        return answers

    def check(self) -> None:
        """Raise Failed where another process is known to have failed or died."""
        if self._ended is not None:
            raise self._ended

    def fail(self, why: str) -> None:
        """Leave, and tell the others why."""
        with self._changed:
            self._word = _Word(None, why)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all have heard the last word, or that one has failed."""
        self._thread.join()

    def _speak(self) -> None:
        while self._round():
            pass
        with suppress(RuntimeError):  # whoever leaves first would cut off the others; what has to be known is known by now
            dist.barrier(group=self._group)

    def _round(self) -> bool:
        """Say what there is to say, hear the others, and tell whether more will follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._word is not None, BEAT)
            word = self._word
        said: list[_Word | None] = [None] * self._size
        try:
            dist.all_gather_object(said, word, group=self._group)
        except RuntimeError as e:
            return self._end(Lost(f"another process has died, or has not answered for {PATIENCE}: {e}"))
        failures = [f"process {rank} failed: {w.failure}" for rank, w in enumerate(said) if w is not None and w.failure is not None]
        if failures:
            return self._end(Failed("\n".join(failures)))
        words = [w for w in said if w is not None]
        return len(words) < self._size or self._deliver(words)

    def _deliver(self, words: list[_Word]) -> bool:
        with self._changed:
            self._word, self._answers = None, [word.value for word in words]
            self._changed.notify_all()
        return not words[0].last

    def _end(self, why: Failed) -> bool:
        with self._changed:
            self._ended = why
            self._changed.notify_all()
        return False
