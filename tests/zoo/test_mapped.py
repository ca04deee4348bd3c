"""Weights that stay in the mapped file, and the memory that the others give back."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from tests.eval.made import make_tiny
from zoo.checkpoint import CheckpointError, MappedFile, SafetensorsFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny(tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    save_file({n: t.bfloat16() for n, t in load_file(file).items()}, file)
    return tmp_path / "model"


def test_weights_of_the_asked_dtype_stay_in_the_file(folder: Path) -> None:
    kept, cast = zoo.load(folder, dtype="bfloat16"), zoo.load(folder, dtype="float32")
    assert all(kept.source.checkpoint.holds(p) for p in kept.parameters())
    assert not any(cast.source.checkpoint.holds(p) for p in cast.parameters())
    ids = torch.arange(8)[None]
    assert torch.equal(kept(ids).argmax(-1), copy.deepcopy(kept)(ids).argmax(-1))


def test_changing_them_leaves_the_file_as_it_is(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    model = zoo.load(folder, dtype="bfloat16")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7)
    assert (folder / "model.safetensors").read_bytes() == before
    assert float(zoo.load(folder, dtype="bfloat16").norm.weight.max()) != 7


def test_a_model_is_not_saved_over_the_files_that_it_lies_in(folder: Path) -> None:
    model = zoo.load(folder, dtype="bfloat16")
    ids = torch.arange(8)[None]
    expected = model(ids)
    with pytest.raises(FileExistsError, match="which the model is read from, so it is never replaced; choose another one"):
        zoo.save(model, folder, overwrite=True)
    zoo.save(model, folder.with_name("other"))
    assert torch.equal(model(ids), expected)
    assert torch.equal(zoo.load(folder.with_name("other"), dtype="bfloat16")(ids), expected)


def test_a_copy_takes_the_bytes_of_its_tensor_alone(folder: Path) -> None:
    weight = zoo.load(folder, dtype="bfloat16").norm.weight.data
    assert weight.untyped_storage().nbytes() == weight.nbytes
    assert len(pickle.dumps(weight)) < weight.nbytes + 1000


def test_giving_back_leaves_neighbours_and_is_read_anew(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((3000 + i,), i, dtype=torch.int32) for i in range(6)}
    save_file(tensors, tmp_path / "x.safetensors")
    file = MappedFile(tmp_path / "x.safetensors")
    neighbour = file.tensor("t3")
    neighbour.fill_(-1)
    for name in tensors:
        if name != "t3":
            file.release(name)
    assert bool((neighbour == -1).all())
    assert all(torch.equal(file.tensor(n), t) for n, t in tensors.items() if n != "t3")


def test_odd_places_empty_tensors_and_kinds_without_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "after": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        "empty": {"dtype": "F16", "shape": [0, 4], "data_offsets": [11, 11]},
        "strange": {"dtype": "F4", "shape": [2], "data_offsets": [11, 12]},
    }
    text = json.dumps(header).encode()
    values = torch.tensor([1.5, -2.0])
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\1\2\3" + values.numpy().tobytes() + b"\0")
    file = MappedFile(path)
    assert file.tensor("odd").tolist() == [1, 2, 3]
    assert torch.equal(file.tensor("after"), values)
    assert file.tensor("empty").shape == (0, 4)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: strange is stored as F4"):
        file.tensor("strange")


def test_an_opened_folder_travels_between_processes(folder: Path) -> None:
    checkpoint = SafetensorsFolder(folder, "model")
    name = next(iter(checkpoint.tensors()))
    tensor = checkpoint.read(name)
    assert torch.equal(pickle.loads(pickle.dumps(checkpoint)).read(name), tensor)


def test_loading_needs_no_compiler(folder: Path) -> None:
    """Drawing first values on the meta device would import torch's compiler, which takes seconds."""
    code = f"import sys, zoo; zoo.load({str(folder)!r}); print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
