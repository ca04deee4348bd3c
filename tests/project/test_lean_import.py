"""`import zoo` and `zoo --help` answer at once: no heavy library is imported before it is needed."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"accelerate", "bitsandbytes", "lm_eval", "matplotlib", "numpy", "torch", "transformers", "triton"}
COMMANDS = {"import zoo": ["-c", "import zoo"], "zoo --help": [str(Path(sys.executable).with_name("zoo")), "--help"]}


def run(args: list[str], folder: Path) -> tuple[set[str], float]:
    """The top-level modules that a Python process imports, and its CPU seconds (wall time would measure the machine's load)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-X", "importtime", *args], cwd=folder, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    timed = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if line not in timed)
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in timed}
    return imported, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("args", COMMANDS.values(), ids=COMMANDS.keys())
def test_start_is_light(args: list[str], tmp_path: Path) -> None:
    runs = [run(args, tmp_path) for _ in range(3)]
    assert runs[0][0] & HEAVY == set()
    assert min(seconds for _, seconds in runs) < 0.5
