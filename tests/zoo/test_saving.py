"""Where a model may be written, and what becomes of what was there."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.eval.made import make_tiny
from zoo.components.contracts import Linear
from zoo.components.spec import load
from zoo.model import Model


@pytest.fixture(scope="module")
def model() -> Model:
    layer = {"mixer": {"projection": {"name": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 8}, "position": "rope"},
             "mlp": {"name": "gated", "hidden": 24}}  # fmt: skip
    return zoo.build({"width": 16, "context": 32, "embed": {"name": "tokens", "vocab": 11}, "layers": [layer], "head": "lm"})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"thesis.tex": "years of work"}, "no config.json"),
        ({"config.json": '{"port": 8080}', "server.py": ""}, "names no model_type"),
        ({"config.json": "{"}, "names no model_type"),
        ({"config.json": '{"model_type": "llama"}', ".git/HEAD": "ref"}, "under version control"),
        ({"model/config.json": '{"model_type": "llama"}'}, "no config.json"),
        ({"config.json": '{"model_type": "llama"}', "checkpoint-500/model.safetensors": "weights"}, "holds folders (checkpoint-500)"),
    ],
)
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_that_is_no_checkpoint_is_never_replaced(model: Model, tmp_path: Path, files: dict[str, str], reason: str,
                                                           overwrite: bool) -> None:  # fmt: skip
    for name, text in files.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    before = contents(tmp_path / "mine")
    with pytest.raises(FileExistsError) as e:
        zoo.save(model, tmp_path / "mine", overwrite=overwrite)
    assert reason in str(e.value)
    assert next(iter(files)).split("/")[0] in str(e.value)
    assert contents(tmp_path / "mine") == before
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_long_folders_are_named_in_part(model: Model, tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i:02}.txt").touch()
    with pytest.raises(FileExistsError, match=r"it holds 00\.txt, .*07\.txt and 4 more"):
        zoo.save(model, tmp_path, overwrite=True)


def test_a_checkpoint_is_replaced_whole_where_asked(model: Model, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    zoo.save(model, folder)
    (folder / "notes.txt").write_text("of the old one")
    with pytest.raises(FileExistsError, match=r"holds a checkpoint: config\.json, model\.safetensors.*overwrite=True.*--overwrite"):
        zoo.save(model, folder)
    zoo.save(model, folder, overwrite=True)
    assert set(contents(folder)) == {"config.json", "model.safetensors"}
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("mask", "folder_mode", "file_mode"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0o002, 0o775, 0o664)])
def test_the_umask_says_who_may_read(model: Model, tmp_path: Path, mask: int, folder_mode: int, file_mode: int) -> None:
    before = os.umask(mask)
    try:
        for _ in range(2):  # a new folder, and one that takes the place of another
            zoo.save(model, tmp_path / "model", overwrite=True)
            assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == folder_mode
            assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "model").iterdir()} == {file_mode}
    finally:
        os.umask(before)


def test_empty_folders_are_used_and_files_refused(model: Model, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    zoo.save(model, tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    for overwrite in (True, False):
        with pytest.raises(FileExistsError, match="file is a file"):
            zoo.save(model, tmp_path / "file", overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "x"


def test_the_current_folder_is_not_pulled_away(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (".", "..", tmp_path):
        with pytest.raises(FileExistsError, match="current folder"):
            zoo.save(model, folder, overwrite=True)


def test_a_tilde_is_the_home_folder(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert zoo.save(model, "~/model").folder == tmp_path / "model"


@pytest.mark.parametrize("failing", [1, 2])
def test_the_old_folder_is_put_back_when_moving_fails(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """Renames of the old folder aside and of the new one in; whichever fails, nothing has changed."""
    folder, calls, real = tmp_path / "model", [], Path.rename
    zoo.save(model, folder)
    (folder / "notes.txt").write_text("of the old one")
    before = contents(folder)

    def rename(self: Path, target: Any) -> Any:
        if self == folder or self.name == "new":
            calls.append(self)
            if len(calls) == failing:
                raise OSError(28, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="No space left"):
        zoo.save(model, folder, overwrite=True)
    assert contents(folder) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_failed_check_changes_nothing(model: Model, tmp_path: Path) -> None:
    zoo.save(model, tmp_path / "model")
    before = contents(tmp_path / "model")

    def check(folder: Path) -> None:
        assert (folder / "config.json").is_file()
        raise ValueError("not equal")

    with pytest.raises(ValueError, match="not equal"):
        zoo.save(model, tmp_path / "model", overwrite=True, check=check)
    assert contents(tmp_path / "model") == before


@pytest.mark.parametrize("kind", ["folder", "gguf", "link"])
@pytest.mark.parametrize("lazy", [True, False])
def test_what_the_model_is_read_from_is_never_replaced(tmp_path: Path, kind: str, lazy: bool) -> None:
    make_tiny(tmp_path / "model")
    source = target = tmp_path / ("model.gguf" if kind == "gguf" else "model")
    if kind == "gguf":
        zoo.save(zoo.load(tmp_path / "model"), source, format="gguf")
    if kind == "link":
        target = tmp_path / "link"
        target.symlink_to(source)
    read, before = zoo.load(source, lazy=lazy), contents(tmp_path)
    with pytest.raises(FileExistsError, match=rf"{target.name} is or holds .*model.*, which the model is read from, so it is never"):
        zoo.save(read, target, format="gguf" if kind == "gguf" else None, overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"format": 5}, TypeError, "format must be str | None, got 5"),
    ({"format": ""}, ValueError, "no format named ''"),
    ({"blocks": 5}, TypeError, "blocks must be str | None, got 5"),
    ({"shard_bytes": 0}, ValueError, "shard_bytes must be at least 1, got 0"),
    ({"shard_bytes": -1}, ValueError, "shard_bytes must be at least 1, got -1"),
    ({"shard_bytes": 1e9}, TypeError, "shard_bytes must be int, got 1000000000.0"),
    ({"overwrite": "no"}, TypeError, "overwrite must be bool, got 'no'"),
])  # fmt: skip
def test_settings_that_make_no_sense(model: Model, tmp_path: Path, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as e:
        zoo.save(model, tmp_path / "model", **settings)
    assert message in str(e.value)
    assert not list(tmp_path.iterdir())


# ---- processes that were killed, and others at the same time ---------------------------------------------------------------------


def left_behind(folder: Path, *parts: str) -> None:
    """What a killed save leaves: its folder with a lock that nobody holds."""
    aside = folder.with_name(f".{folder.name}.saving")
    for part in parts:
        (aside / part).mkdir(parents=True)
        (aside / part / "config.json").write_text(json.dumps({"model_type": "llama", "was": part}))
    (aside / "lock").touch()


def test_what_a_killed_save_left_is_removed(model: Model, tmp_path: Path) -> None:
    left_behind(tmp_path / "model", "new")
    (tmp_path / ".other.saving").mkdir()
    zoo.save(model, tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.saving", "model"]
    assert set(contents(tmp_path / "model")) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_old_checkpoint_that_a_killed_save_had_moved_aside_is_put_back(model: Model, tmp_path: Path, overwrite: bool) -> None:
    left_behind(tmp_path / "model", "new", "old")
    if overwrite:
        zoo.save(model, tmp_path / "model", overwrite=True)
        assert set(contents(tmp_path / "model")) == {"config.json", "model.safetensors"}
    else:
        with pytest.raises(FileExistsError, match="it holds a checkpoint"):
            zoo.save(model, tmp_path / "model")
        assert json.loads((tmp_path / "model/config.json").read_text())["was"] == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_folders_of_that_name_which_no_save_made_are_left_alone(model: Model, tmp_path: Path) -> None:
    (tmp_path / ".model.saving").mkdir()
    (tmp_path / ".model.saving/mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"\.model\.saving is in the way: .*; move it away"):
        zoo.save(model, tmp_path / "model")
    assert contents(tmp_path) == {".model.saving/mine.txt": b"mine"}


@pytest.mark.parametrize("name", ["model", "model.gguf"])
def test_two_saves_at_once_do_not_disturb_each_other(model: Model, tmp_path: Path, name: str) -> None:
    make_tiny(tmp_path / "tiny")
    tiny, outcome = zoo.load(tmp_path / "tiny"), []
    settings: dict[str, Any] = {"format": "gguf"} if name.endswith(".gguf") else {}

    def second() -> None:
        with pytest.raises(BlockingIOError, match=rf"where .*{name} is made, is in use by another process; wait"):
            zoo.save(tiny, tmp_path / name, **settings)
        outcome.append("refused")

    def check(_: Path) -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    zoo.save(tiny, tmp_path / name, check=check, **settings)
    assert outcome == ["refused"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["tiny", name])


@pytest.mark.parametrize("dense", [True, False])
def test_an_unknown_format_is_refused_whatever_the_model(model: Model, tmp_path: Path, dense: bool) -> None:
    if not dense:
        from zoo.quantize import quantize

        model = zoo.build(model.spec)
        quantize(model, "rtn", group_size=8, progress=False)
        assert model.spec.layers[0].mlp.down == load(Linear, {"name": "packed_int", "group_size": 8})  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"no format named 'compressed_tensor'; did you mean 'compressed_tensors'"):
        zoo.save(model, tmp_path / "model", format="compressed_tensor")
    assert not (tmp_path / "model").exists()


def test_a_tokenizer_that_cannot_be_read_is_not_lost_in_silence(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_text("{")
    model = zoo.load(tmp_path / "model")
    with pytest.warns(UserWarning, match=r"written without a tokenizer: .*tokenizer\.json is not JSON"):
        zoo.save(model, tmp_path / "again")
    assert torch.equal(zoo.load(tmp_path / "again").embed.weight, model.embed.weight)
    for path in (tmp_path / "model").glob("*token*"):
        path.unlink()
    shutil.rmtree(tmp_path / "again")
    zoo.save(zoo.load(tmp_path / "model"), tmp_path / "again")  # a checkpoint without one stays one
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == "llama"
