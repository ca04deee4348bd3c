"""The names of ``zoo`` stay what they are, however often and in whatever order they are used."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import zoo

TWICE = """
import zoo
for _ in range(2):
    for name in dir(zoo):
        print(name, type(getattr(zoo, name)).__name__)
"""


def test_no_public_name_is_taken_by_a_module() -> None:
    """Importing a submodule sets its name on the package, which would take the place of a function of that name."""
    modules = {m.name for m in pkgutil.iter_modules(zoo.__path__)}
    assert not modules & set(zoo._LAZY)


def test_every_name_is_there_twice() -> None:
    out = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[: len(out) // 2] == out[len(out) // 2 :]
    assert not [line for line in out if line.endswith(" module")]


def test_lazy_targets_exist() -> None:
    for target in zoo._LAZY.values():
        module, _, name = target.partition(":")
        assert hasattr(importlib.import_module(module), name), target
