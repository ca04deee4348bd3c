"""Hub references: what is in the local cache works without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.zoo.oracle import llama_checkpoint

REVISION = "0123456789012345678901234567890123456789"


def cached(cache: Path, repository: str) -> None:
    """Lay a checkpoint into a hub cache as huggingface-hub does."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    llama_checkpoint(folder / "snapshots" / REVISION)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)


def run(code: str, cache: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_cached_models_load_offline(tmp_path: Path) -> None:
    cached(tmp_path, "org/name")
    for reference in ("org/name", "org/name@main", f"org/name@{REVISION}"):
        found = run(f"import zoo; print(zoo.load({reference!r}).source.reference)", tmp_path)
        assert found.stdout.strip() == reference, found.stderr


def test_what_is_not_there_says_so(tmp_path: Path) -> None:
    found = run("import zoo; zoo.load('org/absent')", tmp_path)
    assert "CheckpointError: org/absent: the hub cannot be reached and the files are not in the local cache" in found.stderr
