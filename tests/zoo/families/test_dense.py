"""Dense decoder families against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.families.harness import CHECKS, Case

CASES = [
    Case("mistral", "MistralForCausalLM", {"sliding_window": 8}),
    Case("mistral, no window", "MistralForCausalLM", {"sliding_window": None, "head_dim": 24}),
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case, check: str, written: Callable[[Case], tuple[Path, Any]]) -> None:
    CHECKS[check](case, *written(case))
