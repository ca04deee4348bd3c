"""The options that say how a model is loaded, on every command that loads one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

import zoo
from tests.eval.made import make_tiny
from tests.zoo.test_classify import SETTINGS, vit
from tests.zoo.test_images import picture
from zoo import cli, loading
from zoo.commands.options import Loading, read_device_map
from zoo.components.contracts import StoredLinear
from zoo.model import Model
from zoo.quantize import quantize

Command = Callable[..., tuple[int, str, str]]
LOADING = ("generate", "eval", "bench", "compare", "classify", "quantize", "convert")
SPREADING = LOADING[:-2]
OPTIONS = ("set", "dtype", "device", "quantized", "device_map", "max_memory", "offload_folder")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain and a quantized checkpoint, of a language model and of a classifier, and an image."""
    root = tmp_path_factory.mktemp("models")
    make_tiny(root / "plain")
    vit(root / "vit", SETTINGS)
    for name, out in (("plain", "packed"), ("vit", "vit-packed")):
        model = zoo.load(root / name)
        quantize(model, "rtn", bits=4, group_size=16)
        zoo.save(model, root / out)
    picture(20, 20, seed=0).save(root / "image.png")
    return {path.name: path for path in root.iterdir()}


class Loaded(NamedTuple):
    """A model, and whether it had packed weights when it was loaded."""

    model: Model
    packed: bool


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Loaded]:
    """The models that commands load."""
    found: list[Loaded] = []
    load = loading.load

    def kept(*args: Any, **options: Any) -> Model:
        model = load(*args, **options)
        found.append(Loaded(model, any(isinstance(module, StoredLinear) for module in model.modules())))
        return model

    monkeypatch.setattr(loading, "load", kept)
    return found


@pytest.fixture
def zoo_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["zoo", *words])
        status = 0
        try:
            cli.main()
        except SystemExit as e:
            status = int(e.code or 0)
        found = capsys.readouterr()
        return status, found.out, found.err

    return run


def words(command: str, folders: dict[str, Path], tmp_path: Path, kind: str) -> list[str]:
    """A command line on the plain or the packed checkpoint, over in an instant."""
    (tmp_path / "text.txt").write_text("a line of text to score\n" * 60)
    model, short = str(folders[kind]), ["--text", str(tmp_path / "text.txt"), "--context", "16"]
    return {
        "generate": [command, model, "a b", "--max-new-tokens", "2"],
        "eval": [command, model, *short],
        "bench": [command, model, "--prompt-tokens", "4", "--new-tokens", "2", "--repeats", "1"],
        "compare": [command, model, model, "--tokens", "8"],
        "classify": [command, str(folders["vit" if kind == "plain" else "vit-packed"]), str(folders["image.png"])],
        "quantize": [command, model, "rtn", "--bits", "8", "--group-size", "0", "--out", str(tmp_path / "out")],
        "convert": [command, model, "--to", "mha", *short, "--limit", "1"],
    }[command]


@pytest.mark.parametrize("command", LOADING)
def test_quantized_weights_are_kept_or_read_as_plain_ones(zoo_command: Command, folders: dict[str, Path], loaded: list[Loaded],
                                                          tmp_path: Path, command: str) -> None:  # fmt: skip
    given = words(command, folders, tmp_path, "packed")
    status, _, err = zoo_command(*given, "--quantized", "dequantise")
    assert status == 2
    assert "quantized='dequantise' is no choice; did you mean 'dequantize'" in err
    other = ["--other-quantized", "dequantize"] if command == "compare" else []
    status, _, err = zoo_command(*given, *other, "--quantized", "dequantize")
    assert status == 0, err
    assert not loaded[0].packed
    if command in SPREADING:
        loaded.clear()
        status, _, err = zoo_command(*given)
        assert status == 0, err
        assert loaded[0].packed


@pytest.mark.parametrize("command", SPREADING)
def test_models_are_spread(zoo_command: Command, folders: dict[str, Path], loaded: list[Loaded], tmp_path: Path, command: str) -> None:
    given, there = words(command, folders, tmp_path, "plain"), ["--offload-folder", str(tmp_path / "there")]
    plain = zoo_command(*given)
    loaded.clear()
    spread = zoo_command(*given, "--device-map", "=cpu", "--device-map", "layers=disk", "--max-memory", "cpu=1GiB", *there)
    assert spread[0] == 0, spread[2]
    assert loaded[0].model.placement.plan.places["layers.0"] == "disk"
    assert loaded[0].model.placement.plan.limits == {"cpu": 1 << 30}
    if command in ("generate", "classify", "compare"):
        assert spread[1] == plain[1]
    status, _, err = zoo_command(*given, "--device-map", "disk")
    assert status == 2
    assert "there is no offload_folder" in err
    status, _, err = zoo_command(*given, "--max-memory", "cpu=1GiB")
    assert (status, err) == (2, "error: max_memory say how a model is spread; give device_map='auto' with them\n")


@pytest.mark.parametrize("command", ["quantize", "convert"])
@pytest.mark.parametrize("option", [("--device-map", "cpu"), ("--max-memory", "cpu=1GiB"), ("--offload-folder", "there")])
def test_what_needs_the_whole_model_refuses_at_once(zoo_command: Command, folders: dict[str, Path], loaded: list[Loaded], tmp_path: Path,
                                                    command: str, option: tuple[str, str]) -> None:  # fmt: skip
    status, _, err = zoo_command(*words(command, folders, tmp_path, "plain"), *option)
    assert status == 2
    assert f"{command.removesuffix('e')}ing needs a model at one place; leave {option[0]} out" in err
    assert not loaded
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("given", "wanted"), [
    (["auto"], "auto"),
    (["balanced"], "balanced"),
    (["cpu"], {"": "cpu"}),
    (["cuda:1"], {"": "cuda:1"}),
    (["1"], {"": "1"}),
    (['{"": 0, "layers.3": "cpu"}'], {"": 0, "layers.3": "cpu"}),
    (["=0", "layers.3=cpu"], {"": "0", "layers.3": "cpu"}),
    (["layers=disk"], {"layers": "disk"}),
])  # fmt: skip
def test_device_maps_are_read(given: list[str], wanted: Any) -> None:
    assert read_device_map(given) == wanted


@pytest.mark.parametrize(("given", "message"), [
    (["auto", "layers=cpu"], "--device-map auto: write name=value"),
    (["layers=cpu", "layers=disk"], "each name once"),
    (["{layers: "], "not YAML"),
])  # fmt: skip
def test_device_maps_that_make_no_sense(given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_device_map(given)


def test_every_command_that_loads_has_all_options() -> None:
    group: Any = typer.main.get_command(cli.app)
    options = {name: {p.name for p in command.params} for name, command in group.commands.items()}
    assert {name for name, have in options.items() if have >= set(OPTIONS)} == set(LOADING)
    assert set(OPTIONS) == set(Loading.__dataclass_fields__)
