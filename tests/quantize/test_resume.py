"""Work folders whose files are damaged: what is lost is computed anew, to the same bits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.quantize.models import same_bits, small
from tests.quantize.test_runner import run
from zoo.model import Model
from zoo.quantize import resume, runner

LAYERS = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """A finished quantization and its work folder."""
    work = tmp_path_factory.mktemp("whole")
    return run(small(layers=LAYERS), bits=3, work_dir=work)[0], work


@pytest.fixture
def work(whole: tuple[Model, Path], tmp_path: Path) -> Path:
    for path in whole[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.fixture
def quantized_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers whose modules are quantized, as they come up."""
    seen: list[int] = []
    real = runner.quantize_module

    def counting(model: Model, path: str, *rest: Any) -> Any:
        seen.append(int(path.split(".")[1]))
        return real(model, path, *rest)

    monkeypatch.setattr(runner, "quantize_module", counting)
    return seen


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "only a header": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path: path.write_bytes(b""),
    "another file": lambda path: save_file({"x": torch.ones(1)}, path),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_stage_costs_itself_and_those_after_it(work: Path, whole: tuple[Model, Path], quantized_layers: list[int],
                                                          damage: Callable[[Path], Any]) -> None:  # fmt: skip
    damage(work / "layers.2.safetensors")
    with pytest.warns(UserWarning, match=r"layers\.2\.safetensors is damaged or cut short .*computed anew"):
        again, _ = run(small(layers=LAYERS), bits=3, work_dir=work)
    assert same_bits(again, whole[0])
    assert set(quantized_layers) == {2, 3}
    quantized_layers.clear()
    assert same_bits(run(small(layers=LAYERS), bits=3, work_dir=work)[0], whole[0])
    assert not quantized_layers


def test_a_stage_that_was_deleted_is_computed_anew(work: Path, whole: tuple[Model, Path], quantized_layers: list[int]) -> None:
    (work / "layers.1.safetensors").unlink()
    assert same_bits(run(small(layers=LAYERS), bits=3, work_dir=work)[0], whole[0])
    assert set(quantized_layers) == {1, 2, 3}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_activations_are_made_from_the_finished_stages(work: Path, whole: tuple[Model, Path], quantized_layers: list[int],
                                                                damage: Callable[[Path], Any]) -> None:  # fmt: skip
    (work / f"layers.{LAYERS - 1}.safetensors").unlink()
    damage(work / "hidden.safetensors")
    with pytest.warns(UserWarning, match=r"hidden\.safetensors is damaged or cut short .*computed anew"):
        again, _ = run(small(layers=LAYERS), bits=3, work_dir=work)
    assert same_bits(again, whole[0])
    assert set(quantized_layers) == {LAYERS - 1}


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_damaged_fingerprint_says_what_to_do(work: Path, text: str) -> None:
    (work / "fingerprint.json").write_text(text)
    with pytest.raises(ValueError, match=rf"fingerprint\.json is .*delete the folder {work} to begin again, or choose another place"):
        run(small(layers=LAYERS), bits=3, work_dir=work)


def test_asking_how_much_is_done_reads_no_tensor(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint = json.loads((work / "fingerprint.json").read_text())
    monkeypatch.setattr(resume, "_read", lambda path: pytest.fail(f"{path} was read"))
    folder = resume.WorkDir(work, fingerprint)
    assert folder.finished([f"layers.{i}" for i in range(LAYERS)]) == LAYERS
    assert folder.finished(["layers.0", "layers.9"]) == 1
    assert folder.hidden(LAYERS - 1) is None  # they are those after all stages


def test_work_of_another_version_is_refused(work: Path) -> None:
    path = work / "fingerprint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"zoo": "0.0.1"}))
    with pytest.raises(ValueError, match=r"belongs to another quantization: zoo was '0\.0\.1', is "):
        run(small(layers=LAYERS), bits=3, work_dir=work)


def test_a_run_killed_before_its_first_rename_is_taken_up(whole: tuple[Model, Path], tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            run(small(layers=LAYERS), bits=3, work_dir=tmp_path / "work")
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"fingerprint.tmp", "lock"}
    (tmp_path / "work/fingerprint.tmp").write_text("{")
    assert same_bits(run(small(layers=LAYERS), bits=3, work_dir=tmp_path / "work")[0], whole[0])
    assert not list((tmp_path / "work").glob("*.tmp"))


def test_files_of_ones_own_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.tmp").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other files: notes\.tmp; move them away"):
        run(small(layers=LAYERS), bits=3, work_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.tmp"]


def test_a_file_in_the_place_of_the_folder_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("mine")
    with pytest.raises(FileExistsError, match=r"work is a file, where there should be the folder where finished layers are kept; move it"):
        run(small(layers=LAYERS), bits=3, work_dir=tmp_path / "work")
    with pytest.raises(OSError, match=r"work/inner, where finished layers are kept, cannot be made: .*; choose another place"):
        run(small(layers=LAYERS), bits=3, work_dir=tmp_path / "work/inner")
    assert (tmp_path / "work").read_text() == "mine"


@pytest.mark.parametrize("finished", [False, True])
def test_a_second_run_is_refused_while_the_first_has_the_folder(work: Path, tmp_path: Path, finished: bool) -> None:
    folder, outcome = work if finished else tmp_path / "new", []

    def second() -> None:
        with pytest.raises(BlockingIOError, match=r", where finished layers are kept, is in use by another process; wait"):
            run(small(layers=LAYERS), bits=3, work_dir=folder)
        outcome.append("refused")

    with resume.reserved(folder):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        run(small(layers=LAYERS), bits=3, work_dir=folder)  # who holds it may enter again
    assert outcome == ["refused"]
    run(small(layers=LAYERS), bits=3, work_dir=folder)


def test_a_folder_in_which_nothing_came_about_goes(tmp_path: Path) -> None:
    with resume.reserved(tmp_path / "work"):
        pass
    assert not (tmp_path / "work").exists()


def test_a_folder_that_cannot_be_written_is_one_error(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise resume.SafetensorError("No space left on device")

    (work / "layers.3.safetensors").unlink()
    monkeypatch.setattr(resume, "save_file", full)
    with pytest.raises(OSError, match=r"layers\.3\.safetensors cannot be written \(No space left.*start the same run again"):
        run(small(layers=LAYERS), bits=3, work_dir=work)
