"""The table in the documentation: how it is made, and that it has a row for every case."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from tests.zoo.families.table import render

FOLDER = Path(__file__).parent


def test_the_largest_errors_are_shown() -> None:
    errors = {"a": {"whole": 1e-7, "cached": 3e-7, "bfloat16": 0.5, "saved": None}, "b, option": {"whole": 2e-7, "padded": None}}
    page = render(errors, {"a": "AForCausalLM", "b, option": "BModel"})
    assert "2 cases of 2 families; the largest error in fp32 is 3.0e-07 (a)." in page
    assert page.endswith("| a | `AForCausalLM` | 3.0e-07 | 0.50 | equal |\n| b, option | `BModel` | 2.0e-07 | - | - |\n")


def test_every_case_has_its_row() -> None:
    """Else write it anew: python -m tests.zoo.families.table docs/families.md."""
    modules = [import_module(f"tests.zoo.families.{path.stem}") for path in FOLDER.glob("test_*.py") if path.stem != Path(__file__).stem]
    values = [getattr(case, "values", [case])[0] for module in modules if hasattr(module, "CHECKS") for case in module.CASES]
    page = (FOLDER.parents[2] / "docs/families.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| (.+?) \| `", page, re.MULTILINE)) == {case.name for case in values}
