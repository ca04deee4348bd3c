"""Where a measurement was made: enough to judge and repeat it."""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from zoo.installed import version

LIBRARIES = ("torch", "transformers", "lm_eval", "triton", "safetensors", "tokenizers", "numpy", "compressed-tensors", "gguf")
CPUINFO = Path("/proc/cpuinfo")


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


def revision() -> str | None:
    """The git commit of the source tree, with ``-dirty`` for uncommitted changes; None where the package is not in a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _cpu() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _gpu(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    return {"model": found.name, "bytes": found.total_memory, "capability": f"{found.major}.{found.minor}"}
