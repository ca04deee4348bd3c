"""Checkpoints in zip files: read like their folder, and refused where they are not what they should be."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zoo
from tests.zoo.oracle import llama_checkpoint
from zoo.checkpoint import CheckpointError, open_checkpoint
from zoo.zipped import members


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama_checkpoint(tmp_path / "model")
    return tmp_path / "model"


def pack(folder: Path, name: str = "model.zip", below: str = "", **more: str) -> Path:
    path = folder.parent / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in folder.iterdir():
            archive.write(file, below + file.name)
        for inner, text in more.items():
            archive.writestr(inner, text)
    return path


@pytest.mark.parametrize("below", ["", "inner/"])
def test_as_its_folder(folder: Path, below: str) -> None:
    path = pack(folder, below=below, **{below + "1_Pooling/config.json": "{}", "__MACOSX/notes": ""})
    ids = torch.arange(8)[None]
    model = zoo.load(path)
    assert torch.equal(model(ids), zoo.load(folder)(ids))
    assert zoo.spec(path) == zoo.spec(folder)
    assert model.source.checkpoint.files == [path]


def test_nothing_is_left_behind(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    path = pack(folder)
    checkpoint = open_checkpoint(path)
    assert len(list(scratch.iterdir())) == 1
    del checkpoint
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        open_checkpoint(pack(folder))
    assert not list(scratch.iterdir())


def damaged(folder: Path) -> Path:
    path = pack(folder)
    data = bytearray(path.read_bytes())
    data[300:400] = bytes(100)
    path.write_bytes(data)
    return path


def cut_short(folder: Path) -> Path:
    path = pack(folder)
    path.write_bytes(path.read_bytes()[:-30])
    return path


def no_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return pack(folder, **{"a/b/config.json": "{}"})


def encrypted(folder: Path) -> Path:
    path = pack(folder)
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02")
    while at >= 0:  # the flag of every entry in the directory
        data[at + 8] |= 1
        at = data.find(b"PK\x01\x02", at + 4)
    path.write_bytes(data)
    return path


def bomb(folder: Path) -> Path:
    """The directory says that a member is larger than any disk."""
    path = pack(folder)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        count = len(archive.infolist())
    at = -1
    for _ in range(count):
        at = data.find(b"PK\x01\x02", at + 1)
        data[at + 24 : at + 28] = (0xFFFFFFF0).to_bytes(4, "little")
    path.write_bytes(data)
    return path


def many(folder: Path) -> Path:
    return pack(folder, **{f"{i}.json": "" for i in range(10_001)})


def climbing(folder: Path) -> Path:
    """Its only config.json lies outside the folder that it is unpacked to."""
    config = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    return pack(folder, **{"../../config.json": config})


@pytest.mark.parametrize(("make", "match"), [
    (damaged, "damaged or no zip archive"), (cut_short, "damaged or no zip archive"), (no_config, r"no config\.json at its top"),
    (encrypted, "encrypted"), (many, "10,001 entries|1[0-9],[0-9]+ entries"), (climbing, r"no config\.json at its top"),
])  # fmt: skip
def test_one_error_that_says_what_to_do(make: Callable[[Path], Path], match: str, folder: Path) -> None:
    path = make(folder)
    with pytest.raises(CheckpointError, match=match) as error:
        zoo.load(path)
    assert str(path) in str(error.value)


def test_a_bomb_is_refused_before_it_is_unpacked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 30))
    with pytest.raises(CheckpointError, match=r"unpacked the archive takes [\d,]+ bytes, .* has 1,073,741,824 free"):
        zoo.load(bomb(folder))


def test_members_elsewhere_are_left_alone(folder: Path) -> None:
    """Names that climb, and pickles, are no members of the folder."""
    path = pack(folder, **{"../evil.json": "{}", "/abs.json": "{}", "pytorch_model.bin": "x"})
    with zipfile.ZipFile(path) as archive:
        taken = members(archive, folder, "test")
    assert {i.filename for i in taken} == {p.name for p in folder.iterdir()}
    assert zoo.spec(path) == zoo.spec(folder)
    assert not (folder.parent.parent / "evil.json").exists()


def test_other_single_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match=r"\.gguf file or a \.zip"):
        zoo.load(tmp_path / "model.onnx")
