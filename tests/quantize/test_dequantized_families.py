"""Quantized checkpoints of every family and format are read as plain ones, also where the family keeps several weights in one tensor."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.quantize.families import CONFIGS, family_model, tokens
from zoo.model import Model
from zoo.quantize import quantize
from zoo.weights import linears

SHARED = ["phi3", "gpt2", "bloom", "gpt_oss", "qwen3_next"]  # families that keep several weights in one tensor
ROUNDED: dict[str, Any] = {"calibration": tokens(2, 8)}
FIXED: dict[str, Any] = {"scale_per": "tensor", "inputs": "tensor"} | ROUNDED
METHODS: list[tuple[str, dict[str, Any], str | None]] = [
    ("rtn", {"group_size": 8, "bits": 8}, "gptq"),
    ("rtn", {"group_size": 8}, "native"),
    ("nf4", {}, "bitsandbytes"),
    ("llm_int8", {}, "bitsandbytes"),
    ("w8a8", {}, None),
    ("fp8", {"scale_per": "tensor"}, None),
]
INPUTS: list[tuple[str, dict[str, Any], str | None]] = [
    ("fp8", FIXED, "fp8_block"),
    ("fp8", FIXED, "modelopt"),
    ("fp8", FIXED, "native"),
    ("fp8", FIXED, "compressed_tensors"),
    ("w8a8", {"inputs": "tensor"} | ROUNDED, "compressed_tensors"),
    ("nvfp4", {"round_inputs": True} | ROUNDED, "compressed_tensors"),
    ("nvfp4", {"round_inputs": True, "tensor_scale": "multiplier"} | ROUNDED, "modelopt"),
]
pytestmark = pytest.mark.filterwarnings("ignore:vLLM and SGLang", "ignore:dequantized weights")


def saved(folder: Path, family: str, method: str, options: dict[str, Any], format: str | None) -> None:
    model = family_model(family).float()
    quantize(model, method, progress=False, **options)
    zoo.save(model, folder, format=format)


def assert_equals(plain: Model, kept: Model) -> None:
    kinds = {child.spec.name for _, child in linears(plain.spec)}
    assert kinds == {"dense"}
    for path, _ in linears(kept.spec):
        ours, packed = plain.get_submodule(path), kept.get_submodule(path)
        assert torch.equal(ours.get_parameter("weight"), packed.dense_weight(torch.float32)), path  # type: ignore[operator]
        for name, bias in packed.named_parameters(recurse=False):
            assert name != "bias" or torch.equal(ours.get_parameter("bias"), bias), path
    rest = {name: p for name, p in kept.named_parameters() if name.rpartition(".")[0] not in dict(linears(kept.spec))}
    assert all(torch.equal(plain.get_parameter(name), p) for name, p in rest.items())


@pytest.mark.parametrize("family", SHARED)
def test_weights_that_share_a_tensor(family: str, tmp_path: Path) -> None:
    saved(tmp_path / "packed", family, "rtn", {"group_size": 8}, None)
    plain = zoo.load(tmp_path / "packed", quantized="dequantize")
    assert_equals(plain, zoo.load(tmp_path / "packed"))
    assert "quantization_config" not in plain.config
    zoo.save(plain, tmp_path / "plain")  # in the family's own layout
    assert_equals(zoo.load(tmp_path / "plain"), plain)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options", "format"), METHODS, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family(family: str, method: str, options: dict[str, Any], format: str | None, tmp_path: Path) -> None:
    saved(tmp_path / "packed", family, method, options, format)
    assert_equals(zoo.load(tmp_path / "packed", quantized="dequantize"), zoo.load(tmp_path / "packed"))


@pytest.mark.parametrize(("method", "options", "format"), INPUTS, ids=[f"{m}-{f}" for m, _, f in INPUTS])
def test_scales_of_inputs_are_said_to_be_left_out(method: str, options: dict[str, Any], format: str | None, tmp_path: Path) -> None:
    saved(tmp_path / "packed", "phi3", method, options, format)
    with pytest.warns(UserWarning, match=r"take their inputs as they are, and the 14 scales .* are left out: layers\.\{0,1\}"):
        plain = zoo.load(tmp_path / "packed", quantized="dequantize")
    assert_equals(plain, zoo.load(tmp_path / "packed"))


def test_only_scales_of_inputs_are_said_to_be_left_out(tmp_path: Path) -> None:
    saved(tmp_path / "packed", "llama", "fp8", {"scale_per": "tensor"}, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.load(tmp_path / "packed", quantized="dequantize")


def test_overrides_are_of_the_plain_model(tmp_path: Path) -> None:
    """Storages are gone by then, and what packed weights refuse may be chosen."""
    saved(tmp_path / "packed", "phi3", "rtn", {"group_size": 8}, None)
    with pytest.raises(zoo.SpecError, match=r"layers\.0\.mlp\.down"):
        zoo.load(tmp_path / "packed", quantized="dequantize", override=["layers.0.mlp.down.bits=3"])
    eager = zoo.load(tmp_path / "packed", quantized="dequantize", override=["layers.*.mixer.kernel=eager"])
    assert_equals(eager, zoo.load(tmp_path / "packed"))
    assert {layer.mixer.kernel.name for layer in eager.spec.layers} == {"eager"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_weights_are_rounded_once(dtype: str, tmp_path: Path) -> None:
    saved(tmp_path / "packed", "gpt2", "fp8", {"scale_per": "tensor"}, None)
    plain, kept = zoo.load(tmp_path / "packed", dtype=dtype, quantized="dequantize"), zoo.load(tmp_path / "packed")
    for path, _ in linears(kept.spec):
        exact = kept.get_submodule(path).dense_weight(torch.float64)  # type: ignore[operator]
        assert torch.equal(plain.get_submodule(path).get_parameter("weight"), exact.to(getattr(torch, dtype))), path


def test_a_spread_model_is_read_as_plain_too(tmp_path: Path) -> None:
    saved(tmp_path / "packed", "phi3", "rtn", {"group_size": 8}, None)
    where: dict[str, int | str] = {"": "cpu", "layers": "disk"}
    spread = zoo.load(tmp_path / "packed", quantized="dequantize", device_map=where, offload_folder=tmp_path / "offload")
    with torch.no_grad():
        assert torch.equal(spread(tokens()), zoo.load(tmp_path / "packed", quantized="dequantize")(tokens()))
