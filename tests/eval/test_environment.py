"""Which source a figure was made with."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from zoo.eval.environment import revision

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments], check=True)

    for folder in ("components", "tests", "recipes"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.py").write_text("a = 1\n")
    (tmp_path / "recipes/mine.yaml").write_text("about: one\n")
    (tmp_path / ".gitignore").write_text("/components/out/\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    return tmp_path


CHANGES: dict[str, Callable[[Path], object]] = {
    "one change": lambda root: (root / "components/part.py").write_text("a = 2\n"),
    "another change": lambda root: (root / "components/part.py").write_text("a = 3\n"),
    "a deletion": lambda root: (root / "components/part.py").unlink(),
    "a new part": lambda root: (root / "components/newcomer.py").write_text("b = 1\n"),
    "another new part": lambda root: (root / "components/newcomer.py").write_text("b = 2\n"),
    "under another name": lambda root: (root / "components/new_comer.py").write_text("b = 2\n"),
}


@needs_git
def test_different_trees_of_one_commit_differ(checkout: Path) -> None:
    clean = revision(checkout)
    assert clean is not None
    assert "dirty" not in clean
    seen = {clean}
    for change in CHANGES.values():
        change(checkout)
        found = revision(checkout)
        assert found == revision(checkout)
        assert found is not None
        assert found.startswith(f"{clean}-dirty-")
        seen.add(found)
        (checkout / "components/part.py").write_text("a = 1\n")
        for path in checkout.glob("components/new*.py"):
            path.unlink()
        assert revision(checkout) == clean
    assert len(seen) == 1 + len(CHANGES)


@needs_git
@pytest.mark.parametrize("name", ["components/out/scratch.py", "components/notes.txt", "scratch.py", "tests/part.py", "recipes/mine.yaml"])
def test_what_no_figure_depends_on_counts_for_nothing(checkout: Path, name: str) -> None:
    """A recipe has its own part in what a variant is known by; ignored files, notes, tests and scripts have none."""
    clean = revision(checkout)
    (checkout / name).parent.mkdir(exist_ok=True)
    (checkout / name).write_text("c = 1\n")
    assert revision(checkout) == clean


def test_no_checkout_and_no_git_are_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert revision(tmp_path) is None
    (tmp_path / ".git").mkdir()  # an empty one, which git refuses
    assert revision(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert revision(tmp_path) is None
    assert capfd.readouterr() == ("", "")
