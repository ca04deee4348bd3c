"""Work folders whose files are damaged: what is lost is computed anew, to the same bits."""

from __future__ import annotations

import json
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
    with pytest.raises(ValueError, match=rf"fingerprint\.json is .*delete the folder {work} to begin again, or give another work_dir"):
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
    left = list((tmp_path / "work").iterdir())
    assert [path.suffix for path in left] == [".tmp"]
    left[0].write_text("{")
    assert same_bits(run(small(layers=LAYERS), bits=3, work_dir=tmp_path / "work")[0], whole[0])
    assert not list((tmp_path / "work").glob("*.tmp"))


def test_files_of_ones_own_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.tmp").write_text("mine")
    with pytest.raises(ValueError, match="holds other files; give an empty folder"):
        run(small(layers=LAYERS), bits=3, work_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.tmp"]


def test_a_folder_that_cannot_be_written_is_one_error(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise resume.SafetensorError("No space left on device")

    (work / "layers.3.safetensors").unlink()
    monkeypatch.setattr(resume, "save_file", full)
    with pytest.raises(OSError, match=r"layers\.3\.safetensors cannot be written \(No space left.*start the same run again"):
        run(small(layers=LAYERS), bits=3, work_dir=work)
