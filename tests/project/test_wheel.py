"""The wheel holds every file of the five folders, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"zoo": "zoo"} | {folder: f"zoo/{folder}" for folder in ("components", "quantize", "eval", "recipes")}


def files_below(folder: Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if not any(part == "__pycache__" or part.startswith(".") for part in path.parts)}


def build_wheel(tmp_path: Path) -> Path:
    """By way of the source distribution, and from a copy: a stale build/ of the checkout cannot fill a gap."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run([sys.executable, "-m", "build", "--no-isolation"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next((tmp_path / "dist").glob("*.whl"))


def test_wheel_holds_every_file_of_the_folders_and_nothing_else(tmp_path: Path) -> None:
    wanted = {f"{target}/{name}" for folder, target in FOLDERS.items() for name in files_below(ROOT / folder)}
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        found = {name for name in wheel.namelist() if not name.endswith("/")}
        metadata = next(name for name in found if name.endswith(".dist-info/METADATA"))
        assert "License-Expression: Apache-2.0" in wheel.read(metadata).decode()
    info = metadata.removesuffix("METADATA")
    packed = {name for name in found if not name.startswith(info)}
    assert not wanted - packed, "not in the wheel (a new kind of file goes into package-data in pyproject.toml)"
    assert not packed - wanted, "in the wheel, but not in the folders"
