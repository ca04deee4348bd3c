"""What zoo.load and zoo.build are given is checked before anything is read: one clear error, that names the argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.zoo.oracle import llama_checkpoint
from zoo.multi_token import load as load_depths

DEVICES = ["cuda", "mps", "xyz", "", "cuda:99", "cpu:x", 5, None, True, 1.5, ["cpu"]]
DTYPES = [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, "int8", "float8_e4m3fn", "complex64",
          "torch.float32", "flaot32", "", None, 5, ["float32"]]  # fmt: skip
TYPES: list[tuple[str, Any]] = [
    *(("override", value) for value in (None, 5, [5], "layers.*.mixer.kernel=eager", {"a": "b"})),
    *(("device_map", value) for value in (5, [], {5: "cpu"}, {None: "cpu"}, {"": None}, {"": 1.5}, {"": True}, {"": ["cpu"]})),
    *(("max_memory", value) for value in (5, [], "cpu", {"cpu": 1.5}, {"cpu": None}, {"cpu": math.nan}, {"cpu": [1]}, {None: 1})),
    *(("offload_folder", value) for value in (5, ["a"])),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("borders") / "model"
    llama_checkpoint(path)
    return path


@pytest.fixture
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.checkpoint.SafetensorsFolder.read", lambda self, name: pytest.fail("a tensor was read"))


@pytest.mark.usefixtures("nothing_read")
@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_devices_that_are_not_there(folder: Path, device: Any) -> None:
    if isinstance(device, str) and device in ("cuda", "mps") and torch.accelerator.is_available():
        pytest.skip("the machine may have this device")
    acts: list[tuple[Callable[..., object], object]] = [(zoo.load, folder), (zoo.build, SPEC), (load_depths, folder)]
    for act, what in acts:
        with pytest.raises(ValueError, match=r"^device=.*here are cpu, meta") as error:
            act(what, device=device)
        assert "\n" not in str(error.value)


@pytest.mark.usefixtures("nothing_read")
@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_dtypes_that_weights_cannot_have(folder: Path, dtype: Any) -> None:
    for act in (lambda: zoo.load(folder, dtype=dtype), lambda: zoo.build(SPEC, dtype=dtype)):
        with pytest.raises(ValueError, match=r"^dtype=.* is none that weights can have.*known: auto, float32, bfloat16, float16, float64$"):
            act()


@pytest.mark.usefixtures("nothing_read")
@pytest.mark.parametrize(("name", "value"), TYPES, ids=lambda value: repr(value))
def test_arguments_of_another_type(folder: Path, name: str, value: Any) -> None:
    spread = {"device_map": "auto"} if name in ("max_memory", "offload_folder") else {}
    with pytest.raises(TypeError, match=f"^{name} must be "):
        zoo.load(folder, **{**spread, name: value})


@pytest.mark.parametrize("dtype", ["auto", "float32", torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("cpu")])
def test_what_is_right_stays_right(folder: Path, dtype: Any, device: Any) -> None:
    model = zoo.load(folder, dtype=dtype, device=device, lazy=str(device) == "meta")
    assert model.device.type == str(device)


SPEC = {"width": 16, "context": 8, "embed": {"name": "tokens", "vocab": 20}, "head": "lm",
        "layers": [{"mixer": {"projection": {"name": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 8}, "position": "rope"},
                    "mlp": {"name": "gated", "hidden": 16}}]}  # fmt: skip
