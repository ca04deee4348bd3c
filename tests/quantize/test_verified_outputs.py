"""Saved models whose parts or outputs are not those in memory are refused; what cannot be compared is saved, and that is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.eval.made import make_tiny
from tests.quantize.damaged import damage, edit, quantized_and_saved
from tests.quantize.models import ids, small
from tests.zoo.oracle import llama_checkpoint
from zoo import cli
from zoo.commands.output import print_saved
from zoo.loading import NotEnoughMemory
from zoo.model import Model
from zoo.quantize import calibrate_cache, quantize, verify
from zoo.saving import check_saved
from zoo.verification import ALIKE, PROMPT, UNLIKE, VerificationError, logit_difference, place, tolerance

pytestmark = pytest.mark.filterwarnings("ignore:vLLM and SGLang multiply")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    return quantized_and_saved(tmp_path_factory.mktemp("made"))


@pytest.fixture
def model(made: tuple[Model, Path]) -> Model:
    return made[0]


@pytest.fixture
def saved(made: tuple[Model, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made[1], tmp_path / "saved"))


@pytest.fixture
def half(tmp_path: Path) -> tuple[Model, Path]:
    """In bfloat16, both to damage."""
    return quantized_and_saved(tmp_path, "bfloat16")


def scaled(factor: float) -> Callable[..., Tensor]:
    return lambda module, inputs, output: output * factor


def test_outputs_in_bfloat16_are_equal_and_a_norm_that_is_too_large_is_named(half: tuple[Model, Path]) -> None:
    model, saved = half
    assert verify(model, saved).logit_difference == 0
    damage(saved, lambda t: t["model.norm.weight"].mul_(1.45))
    with pytest.raises(VerificationError, match=r"norm\.weight: the values differ\n.*\n?.*the logits differ by"):
        verify(model, saved)


@pytest.mark.parametrize("factor", [1.45, 1.01, torch.nan])
def test_outputs_that_differ_although_all_tensors_are_equal(factor: float, half: tuple[Model, Path]) -> None:
    """In bfloat16 too, one hundredth is more than equal computations differ by."""
    model, saved = half
    model.norm.register_forward_hook(scaled(factor))
    with pytest.raises(VerificationError, match="the logits"):
        verify(model, saved)


def test_norms_that_are_too_large_are_found_on_another_device_too(half: tuple[Model, Path]) -> None:
    model, folder = half
    saved = zoo.load(folder)
    saved.norm.register_forward_hook(scaled(1.45))
    difference, _ = logit_difference(model, saved, 0)
    assert difference > UNLIKE[model.dtype.itemsize]
    assert tolerance(model, saved) == ALIKE < 1e-5
    other = zoo.load(folder, override=["layers.*.mixer.kernel=eager"])
    assert tolerance(model, other) == UNLIKE[2]
    assert logit_difference(model, other, 0)[0] < UNLIKE[2]


@pytest.mark.parametrize("factor", [torch.nan, torch.inf, 1.01])
@pytest.mark.parametrize("tokens", [1, PROMPT])
def test_a_fault_of_one_path_alone(factor: float, tokens: int, made: tuple[Model, Path]) -> None:
    """Of one token or of many, whichever comes first."""
    model, folder = made
    saved = zoo.load(folder)
    saved.norm.register_forward_hook(lambda module, inputs, output: output * factor if output.shape[1] == tokens else output)
    difference, not_finite = logit_difference(model, saved, 0)
    assert not_finite == 0
    assert not difference <= ALIKE


def test_a_fault_of_one_path_in_memory_is_refused(half: tuple[Model, Path]) -> None:
    """No value of the model's checkpoint explains it."""
    model, saved = half
    model.norm.register_forward_hook(lambda module, inputs, output: output * torch.nan if output.shape[1] == 1 else output)
    with pytest.raises(VerificationError, match=r"4\.0% of the logits are NaN or infinite in memory, though the model's own checkpoint"):
        verify(model, saved)


def test_outputs_that_are_0_throughout_are_equal(tmp_path: Path) -> None:
    model = small(tied=False)
    with torch.no_grad():
        model.get_parameter("head.out.weight").zero_()
    zoo.save(model, tmp_path / "saved")
    assert verify(model, tmp_path / "saved").logit_difference == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 5e4}, r"layers\.0:2\.mixer\.position\.theta: 10000\.0 in memory, 50000\.0 in the folder"),
        ({"rms_norm_eps": 1e-2}, r"norm\.eps: 1e-0\d in memory, 0\.01 in the folder"),
        ({"max_position_embeddings": 128}, r"context: 64 in memory, 128 in the folder"),
    ],
)
def test_parts_that_differ_are_named(change: dict[str, Any], message: str, model: Model, saved: Path) -> None:
    def write(config: dict[str, Any]) -> None:
        config.pop("rope_parameters", None)
        config.update({"rope_theta": 10000.0} | change)

    edit(saved / "config.json", write)
    with pytest.raises(VerificationError, match=message):
        verify(model, saved)


def test_a_layer_that_is_missing_whole_is_named(model: Model, saved: Path) -> None:
    """A shorter model loads without complaint."""
    edit(saved / "config.json", lambda config: config.update(num_hidden_layers=1))
    damage(saved, lambda t: [t.pop(name) for name in list(t) if ".layers.1." in name])
    with pytest.raises(VerificationError, match=r"layers\.1\.norm: rms in memory, None in the folder"):
        verify(model, saved)


@pytest.mark.parametrize("stored", ["beside the weights", "in the spec"])
def test_scales_of_a_cache_that_differ(stored: str, tmp_path: Path) -> None:
    model = small()
    if stored == "beside the weights":
        quantize(model, "rtn", bits=8, group_size=None, progress=False)
    calibrate_cache(model, "fp8", calibration=ids(2, 16), progress=False)
    zoo.save(model, tmp_path / "saved", check=partial(check_saved, model))
    if stored == "beside the weights":
        damage(tmp_path / "saved", lambda t: t["model.layers.1.self_attn.v_scale"].mul_(2))
    else:
        scales = [list(row) for row in model.spec.cache.scales]  # type: ignore[attr-defined]
        scales[1][1] *= 2
        edit(tmp_path / "saved/config.json", lambda config: config["zoo_spec"]["cache"].update(scales=scales))
    with pytest.raises(VerificationError, match=r"cache\.scales: \(\(.* in memory, \(\(.* in the folder"):
        verify(model, tmp_path / "saved")


def test_a_cache_that_is_not_in_the_folder(tmp_path: Path) -> None:
    model = small()
    quantize(model, "rtn", bits=8, group_size=None, progress=False)
    zoo.save(model, tmp_path / "saved")
    calibrate_cache(model, "int8", calibration=ids(2, 16), progress=False)
    with pytest.raises(VerificationError, match="cache: int8 in memory, dense in the folder"):
        verify(model, tmp_path / "saved")


def test_how_a_model_is_run_is_not_in_folders_and_not_compared(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "model", hidden_size=64, max_position_embeddings=64)
    model = zoo.load(tmp_path / "model", override=["layers.*.mixer.kernel=eager", "cache=paged"])
    quantize(model, "rtn", group_size=16, progress=False)
    saved = zoo.save(model, tmp_path / "saved")
    assert saved.verified is not None
    assert saved.verified.logit_difference < UNLIKE[4]


# ---- where no second model fits --------------------------------------------------------------------------------------------------


def no_room(*_: Any, **__: Any) -> Model:
    raise NotEnoughMemory("the weights take 2.00 GiB as float32, cpu has 1.00 GiB free")


def torn(*_: Any, **__: Any) -> Model:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("failure", [no_room, torn])
@pytest.mark.parametrize("check", ["by itself", "asked for"])
def test_what_cannot_be_compared_is_saved_and_said(
    failure: Any, check: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zoo.verification.load", failure)
    asked = {"check": partial(check_saved, model)} if check == "asked for" else {}
    with pytest.warns(UserWarning, match="the saved weights were not compared with those in memory: .*(free|out of memory)"):
        saved = zoo.save(model, tmp_path / "saved", **asked)
    assert saved.verified is None
    assert (tmp_path / "saved/model.safetensors").is_file()
    print_saved(saved)
    printed = capsys.readouterr().out
    assert "it was not compared with the model in memory" in printed
    assert "equal" not in printed


@pytest.mark.parametrize(
    "words",
    [("quantize", "MODEL", "rtn", "--group-size", "16"), ("convert", "MODEL", "--to", "mha", "--context", "16", "--limit", "1")],
)
@pytest.mark.filterwarnings("ignore:the saved weights were not compared")
def test_commands_save_what_cannot_be_compared(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny(tmp_path / "model")
    monkeypatch.setattr("zoo.verification.load", no_room)
    given = [str(tmp_path / "model") if word == "MODEL" else word for word in words]
    monkeypatch.setattr("sys.argv", ["zoo", *given, "--out", str(tmp_path / "out")])
    with suppress(SystemExit):
        cli.main()
    printed = capsys.readouterr()
    assert "it was not compared with the model in memory" in printed.out, printed.err
    assert (tmp_path / "out/model.safetensors").is_file()
    assert not (tmp_path / "out.work").exists()


@pytest.mark.parametrize(("spare", "device"), [(1, "cpu"), (4 * 96 * 64, "cpu"), (4 * 4 * 96 * 64 + 1, "meta")])
def test_the_second_model_is_read_on_the_cpu_where_its_device_has_no_room_to_work(
    spare: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """spare: bytes that the device has beyond those of the weights, of which the largest has 96 x 64 elements."""
    model = small().to("meta")
    monkeypatch.setattr("zoo.verification.available_bytes", lambda _: 1000 + spare)
    assert place(model, 1000) == torch.device(device)
