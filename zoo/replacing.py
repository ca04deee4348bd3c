"""One process at a time in a folder, and outputs that take the place of old ones in one step.

Locks are files that the system releases with their process, however it ends, so nothing that a killed process leaves behind blocks
the next one or lies about for ever.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK, NEW, OLD = "lock", "new", "old"


@contextmanager
def locked(folder: Path, purpose: str) -> Iterator[None]:
    """Within this, no other process or thread holds ``folder``, which is made where it is not there; it goes if nothing was put in it.

    May be entered again by the thread that holds it. purpose: what the folder is for, in messages. Raises BlockingIOError where
    another process or thread holds it, FileExistsError where a file has its place.
    """
    _make(folder, purpose)
    lock = FileLock(folder.resolve() / LOCK, is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise BlockingIOError(
            f"{folder}, {purpose}, is in use by another process; wait until that is done, or choose another place"
        ) from None
    try:
        yield
    finally:
        if lock.lock_counter == 1 and [path.name for path in folder.iterdir()] == [LOCK]:
            shutil.rmtree(folder)  # before the lock is released: later it might be another's
        lock.release()


def _make(folder: Path, purpose: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file, where there should be the folder {purpose}; move it away, or choose another place")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise type(e)(f"{folder}, {purpose}, cannot be made: {e.strerror or e}; choose another place") from None


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` in which this process alone makes what is to come there; it is gone afterwards.

    What a killed process left in it is removed first, and an old target that it had moved aside is put back. Raises BlockingIOError
    while another process writes the target.
    """
    aside = target.with_name(f".{target.name}.saving")
    if aside.is_dir() and any(aside.iterdir()) and not (aside / LOCK).exists():
        raise FileExistsError(f"{aside} is in the way: the folder {target} is made there first; move it away")
    with locked(aside, f"where {target} is made"):
        _put_right(aside, target)
        try:
            yield aside
        finally:
            _put_right(aside, target)


def move_in(made: Path, target: Path) -> None:
    """Put a finished folder, made in that of ``beside``, in its place by renaming; an old one is moved aside, and put back on failure."""
    if target.exists():
        target.rename(made.with_name(OLD))
    made.rename(target)


def _put_right(aside: Path, target: Path) -> None:
    """Put back an old target whose place nothing has taken, and remove all else."""
    if (aside / OLD).exists() and not target.exists():
        (aside / OLD).rename(target)
    clear(aside)


def clear(folder: Path) -> None:
    """Remove all that is in a folder which this process has locked."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
