"""Where a measurement was made: enough to judge and repeat it."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from zoo.installed import version

LIBRARIES = ("torch", "transformers", "lm_eval", "triton", "safetensors", "tokenizers", "numpy", "compressed-tensors", "gguf")
CPUINFO = Path("/proc/cpuinfo")
ROOT = Path(__file__).resolve().parents[1]
SOURCE = ("components", "zoo", "quantize", "eval", "recipes", ":(exclude)recipes/*.yaml")  # that figures depend on: no docs, no tests


def describe_environment() -> dict[str, Any]:
    """Plain data: date (UTC), versions, processor, threads, memory, GPUs, and the revision of the source where it is a checkout."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "zoo": version("modular-zoo"),
        "revision": revision(),
        "libraries": {name: version(name) for name in LIBRARIES},
        "cpu": {"model": _cpu(), "instructions": torch.backends.cpu.get_cpu_capability(), "logical_cores": os.cpu_count()},
        "threads": torch.get_num_threads(),
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def revision(root: Path = ROOT) -> str | None:
    """The git commit of a source tree, with ``-dirty-`` and a hash of what differs from it in the packages: changed files, and new
    ones in Python.

    None where the tree is no checkout, or git does not tell.
    """
    if not (root / ".git").exists():
        return None
    commit = _git(root, "describe", "--always", "--abbrev=12", "--exclude=*")
    changes = _git(root, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--", *SOURCE)
    new = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *SOURCE)
    if commit is None or changes is None or new is None:
        return None
    # A new part is found by its file alone, so files that git does not know count too.
    files = {name: root / os.fsdecode(name) for name in new.split(b"\0") if name.endswith(b".py")}
    parts = [changes, *(name + b"\0" + file.read_bytes() for name, file in files.items() if file.is_file())]
    dirty = f"-dirty-{hashlib.sha256(b''.join(parts)).hexdigest()[:12]}" if any(parts) else ""
    return commit.decode().strip() + dirty


def _git(root: Path, *arguments: str) -> bytes | None:
    """What git prints, None where it is absent, refuses or hangs."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _cpu() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _gpu(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    return {"model": found.name, "bytes": found.total_memory, "capability": f"{found.major}.{found.minor}"}
