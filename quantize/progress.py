"""Progress of a long run on standard error: a bar on a terminal, one line a stage elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, done: int, enabled: bool, cost: str, notes: Iterable[str] = ()) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with a few words after each stage. done: stages finished by an earlier run. cost, notes: said before."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, quiet=not enabled)
    left_over = f", {done} of {total} stages are done already" if done else ""
    for line_before in (f"quantizing takes {cost}{left_over}", *notes):
        console.print(line_before, highlight=False, markup=False, soft_wrap=True)
    if console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, disable=not enabled) as bar:
            task = bar.add_task("quantizing", total=total, completed=done)
            yield lambda words: bar.update(task, advance=1, description=words)
        return
    start, finished = time.perf_counter(), 0

    def line(words: str) -> None:
        nonlocal finished
        finished += 1
        left = (time.perf_counter() - start) / finished * (total - done - finished)
        console.print(f"{done + finished}/{total} {words}, about {left:.0f} s left", highlight=False, soft_wrap=True)

    yield line
