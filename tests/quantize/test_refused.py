"""What quantize refuses before it changes anything: arguments of other types, damaged weights, activations that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.quantize.models import ids, same_bits, small
from zoo.components.linear.dense import DenseLinear
from zoo.model import Model
from zoo.quantize import quantize


@pytest.mark.parametrize(("name", "value", "wanted"), [
    ("method", None, "str | Mapping[str, Any] | Quantizer"),
    ("method", 5, "str | Mapping[str, Any] | Quantizer"),
    ("transforms", "awq", "got 'awq'; for one write transforms=['awq']"),
    ("transforms", [5], "Sequence[str | Mapping[str, Any] | Transform]"),
    ("rules", "*.down=keep", "Sequence[str], got '*.down=keep'; for one write rules=['*.down=keep']"),
    ("rules", None, "Sequence[str]"),
    ("rules", [5], "Sequence[str]"),
    ("choices", 5, "Sequence[int] | None"),
    ("choices", [2, 4.0], "Sequence[int] | None"),
    ("choices", ["4"], "Sequence[int] | None"),
    ("seed", 1.5, "int"),
    ("seed", True, "int"),
    ("samples", 1.5, "int | None"),
    ("calibration", 5, "str | Path | Sequence[int]"),
    ("least_tokens", 1.5, "int"),
    ("true_sequential", "no", "bool"),
    ("all_experts", 1, "bool"),
    ("progress", "x", "bool"),
    ("work_dir", 5, "str | Path | None"),
    ("offload", 5, "str | Path | None"),
])  # fmt: skip
def test_arguments_of_other_types(name: str, value: Any, wanted: str) -> None:
    model = small()
    with pytest.raises(TypeError) as error:
        quantize(model, **({"method": "rtn", "group_size": 32, "calibration": ids(), "progress": False} | {name: value}))
    assert f"{name} must be " in str(error.value)
    assert wanted in str(error.value)
    assert same_bits(model, small())


def test_all_of_them_are_named_at_once() -> None:
    with pytest.raises(TypeError, match=r"^rules must be .*; seed must be int, got 1\.5$"):
        quantize(small(), "rtn", rules="a=keep", seed=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["work_dir", "offload"])
def test_an_empty_path_is_not_the_current_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    empty: dict[str, Any] = {name: ""}
    with pytest.raises(ValueError, match=f"{name} is empty; name a folder, or leave it out"):
        quantize(small(), "rtn", group_size=32, progress=False, **empty)
    assert not list(tmp_path.iterdir())


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    quantize(small(), "rtn", group_size=32, progress=False, work_dir="~/work")
    assert (tmp_path / "work/layers.1.safetensors").is_file()


@pytest.mark.parametrize("bits", [math.nan, math.inf, -math.inf, -3.5, 0.0])
def test_bits_that_are_no_number_of_bits(bits: float) -> None:
    with pytest.raises(ValueError, match=rf"bits={bits}: give a positive, finite number of bits per weight"):
        quantize(small(), "rtn", group_size=32, bits=bits, calibration=ids(), progress=False)


@pytest.mark.parametrize(("damaged", "value"), [
    ("layers.1.mlp.down.weight", math.nan),
    ("layers.1.mlp.down.weight", math.inf),
    ("layers.1.mixer_norm.weight", math.nan),
    ("norm.weight", math.nan),
])  # fmt: skip
def test_a_loaded_model_is_looked_at_before_any_module_is_replaced(damaged: str, value: float) -> None:
    model = small()
    with torch.no_grad():
        model.get_parameter(damaged).flatten()[0] = value
    with pytest.raises(ValueError, match=rf"{damaged.removesuffix('.weight')}(\.weight)?: the weights? holds? NaN"):
        quantize(model, "rtn", group_size=32, progress=False)
    assert all(isinstance(model.get_submodule(f"layers.{i}.mlp.{name}"), DenseLinear) for i in range(2) for name in ("gate", "up", "down"))


METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"group_size": 32},
    "gptq": {"group_size": 32},
    "awq": {"group_size": 32},
    "auto_round": {"group_size": 32, "iterations": 1},
    "w8a8": {"inputs": "tensor"},
    "fp8": {"scale_per": "tensor", "inputs": "tensor"},
    "nvfp4": {"round_inputs": True},
    "aqlm": {"rounds": 1, "bits": 4, "steps": 2},
}


@pytest.mark.parametrize("transforms", [[], ["smoothquant"]], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_activations_that_are_not_finite_are_one_error_that_says_where(method: str, transforms: list[str]) -> None:
    model = small(tied=False)
    with torch.no_grad():
        model.embed.weight[7, 0] = math.nan
    place = "mixer_norm" if transforms or method == "awq" else "mixer.projection.[qkv]"
    with pytest.raises(ValueError, match=rf"^layers\.0\.{place}: activations hold NaN, infinity .* load the model in a wider dtype"):
        quantize(model, method, calibration=ids(), transforms=transforms, progress=False, **METHODS[method])
    assert isinstance(model.layers[0].mixer.projection.q, DenseLinear)


def spoil_output(model: Model) -> None:
    model.layers[1].register_forward_hook(lambda *_: _nan(_[-1]))


def spoil_head(model: Model) -> None:
    model.head.register_forward_hook(lambda *_: _nan(_[-1]))


def _nan(x: Tensor) -> Tensor:
    return torch.full_like(x, math.nan)


@pytest.mark.parametrize(("spoil", "settings", "message"), [
    (spoil_output, {"method": "auto_round", "iterations": 1}, r"^layers\.1: its outputs on the calibration data hold NaN"),
    (spoil_head, {"method": "rtn", "bits": 4.5}, r"^the model's outputs on the calibration data hold NaN"),
])  # fmt: skip
def test_targets_that_are_not_finite(spoil: Callable[[Model], None], settings: dict[str, Any], message: str) -> None:
    model = small()
    spoil(model)
    with pytest.raises(ValueError, match=message):
        quantize(model, calibration=ids(), group_size=32, progress=False, **settings)
