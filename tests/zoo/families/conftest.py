"""One checkpoint on disk for each case, shared by its checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.families.harness import Case


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def get(case: Case) -> tuple[Path, Any]:
        if case.name not in made:
            folder = tmp_path_factory.mktemp("family")
            made[case.name] = (folder, case.write(folder))
        return made[case.name]

    return get
