"""The table of families and options in the documentation, with the errors that the tests of this folder measure.

``python -m tests.zoo.families.table docs/families.md`` runs every case, the slow ones too, and writes the table if all pass.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

HEAD = """# Checkpoint families

Every case is a tiny checkpoint with random weights, norms and biases too, that transformers {transformers} wrote to disk; `zoo.load`
reads the folder, and the outputs are compared with transformers' on tokens beyond the trained context, or on images of several
sizes. Written by `python -m tests.zoo.families.table docs/families.md`, which runs the tests of `tests/zoo/families` and keeps what
they measured. The language models of gemma3 and qwen2_vl and the architectures of GGUF files have tests of their own beside these.

* fp32: the largest difference over the largest value, of whole sequences through two attention kernels, of rows that are padded on
  the left and on the right, and of chunks and single tokens through a cache. Tests fail at 1e-5.
* bfloat16: the error against transformers' fp32 result, in units of transformers' own bfloat16 error. Tests fail at 2.
* saved: what `zoo.save` writes, transformers loads, and answers as it does from the original files, to the bit.

{count} cases of {families} families; the largest error in fp32 is {largest:.1e} ({worst}).

| family and option | transformers | fp32 | bfloat16 | saved |
| --- | --- | --- | --- | --- |
"""


@dataclass
class Measured:
    """A plugin that calls each case's check as its test does, and keeps what it returns by the case's name and the check's."""

    errors: dict[str, dict[str, float | None]] = field(default_factory=lambda: defaultdict(dict))
    models: dict[str, str] = field(default_factory=dict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool | None:
        parameters = getattr(getattr(pyfuncitem, "callspec", None), "params", {})
        if not {"case", "check"} <= parameters.keys():
            return None
        case, check = parameters["case"], parameters["check"]
        found = pyfuncitem.module.CHECKS[check](case, *pyfuncitem.funcargs["written"](case))
        self.errors[case.name][check] = found
        self.models[case.name] = case.model
        return True


def render(errors: Mapping[str, Mapping[str, float | None]], models: Mapping[str, str]) -> str:
    """The page. errors: by case and check; None where a check measures nothing."""
    exact = {name: largest(checks[c] for c in checks if c not in ("bfloat16", "saved")) for name, checks in errors.items()}
    worst = max(exact, key=lambda name: exact[name] or 0.0)
    families = {name.split(",")[0].split("#")[0] for name in errors}
    head = HEAD.format(transformers=version("transformers"), count=len(errors), families=len(families),
                       largest=exact[worst] or 0.0, worst=worst)  # fmt: skip
    return head + "".join(_row(name, models[name], exact[name], checks) for name, checks in sorted(errors.items()))


def _row(name: str, model: str, exact: float | None, checks: Mapping[str, float | None]) -> str:
    ratio = checks.get("bfloat16")
    cells = [name, f"`{model}`", "-" if exact is None else f"{exact:.1e}", "-" if ratio is None else f"{ratio:.2f}"]
    return f"| {' | '.join([*cells, 'equal' if 'saved' in checks else '-'])} |\n"


def largest(found: Iterable[float | None]) -> float | None:
    return max((f for f in found if f is not None), default=None)


def main(page: Path) -> int:
    measured = Measured()
    code = pytest.main(["-q", "-m", "", "-k", "test_parity", str(Path(__file__).parent)], plugins=[measured])
    if code != pytest.ExitCode.OK:
        print(f"{page} is left as it was: not all cases pass")
        return int(code)
    with tempfile.NamedTemporaryFile("w", dir=page.parent, delete=False) as scratch:
        scratch.write(render(measured.errors, measured.models))
    Path(scratch.name).chmod(0o644)
    Path(scratch.name).rename(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
