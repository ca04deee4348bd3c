"""FP8 checkpoints in the way of DeepSeek, and those of NVIDIA's Model Optimizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from tests.quantize.models import ids, same_bits
from tests.zoo.families.harness import Case
from tests.zoo.oracle import llama_checkpoint
from zoo.checkpoint import CheckpointError
from zoo.components.contracts import Linear
from zoo.components.linear.dense import Dense
from zoo.components.linear.packed_float import FloatInputs, PackedFloat
from zoo.components.numerics import floats, scaled
from zoo.components.spec import TensorInfo
from zoo.dequantized import from_fp8
from zoo.quantize import quantize, verify
from zoo.quantize.formats.fp8_block import FP8Block
from zoo.quantize.formats.modelopt import ALGORITHMS, ModelOpt
from zoo.storages import format_for

FP8, OPT = FP8Block(), ModelOpt()
NAME = "model.layers.0.mlp.down_proj"
IN_FP8 = {"weight": TensorInfo((256, 256), "float8_e4m3fn"), "weight_scale_inv": TensorInfo((2, 2), "float32")}
BLOCK = PackedFloat(group_outputs=128, group_size=128, inputs=FloatInputs(group_size=128))
TENSOR = PackedFloat(group_outputs=None, inputs=FloatInputs())
STATIC = PackedFloat(group_outputs=None, inputs=FloatInputs(scale=None, tensor_scale="multiplier"))
POWERS = replace(BLOCK, scale="e8m0", inputs=FloatInputs(group_size=128, scale="e8m0", scale_rule="ceil"))


def fp8_config(**changes: Any) -> dict[str, Any]:
    """As DeepSeek-V3 publishes it."""
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]} | changes


def draw(storage: PackedFloat, inputs: int = 256, outputs: int = 200) -> dict[str, torch.Tensor]:
    found = {}
    for name, info in storage.own_tensors(inputs, outputs, True).items():
        codes = torch.randint(120, info.shape, generator=torch.Generator().manual_seed(len(found)), dtype=torch.uint8)
        found[name] = codes if info.dtype == "uint8" else codes.to(getattr(torch, info.dtype or "float32"))
    return found


def saved(folder: Path, method: str, format: str, rules: list[str] | None = None, **options: Any) -> zoo.Model:
    llama_checkpoint(folder / "model", hidden_size=64, intermediate_size=96, head_dim=16, max_position_embeddings=64, attention_bias=True)
    model = zoo.load(folder / "model")
    quantize(model, method, calibration=ids(), progress=False, rules=rules or [], **options)
    zoo.save(model, folder / "quantized", format=format)
    return model


# ---- quant_method fp8 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "scale", "expected"),
    [
        ({}, "float32", BLOCK),
        ({}, "bfloat16", replace(BLOCK, scale="bfloat16")),
        ({"scale_fmt": "ue8m0"}, "float8_e8m0fnu", POWERS),
        ({"weight_block_size": None}, "float32", TENSOR),
        ({"weight_block_size": None, "activation_scheme": "static"}, "float32", STATIC),
        ({"weight_block_size": [64, 32]}, "float32", PackedFloat(group_outputs=64, group_size=32, inputs=FloatInputs(group_size=32))),
    ],
)
def test_fp8_schemes_are_read_and_written(changes: dict[str, Any], scale: str, expected: PackedFloat) -> None:
    tensors = IN_FP8 | {"weight_scale_inv": TensorInfo((), scale)}
    config = fp8_config(**changes)
    assert format_for(config) == FP8
    assert FP8.storage(config, NAME, tensors) == expected
    assert FP8.storage(config, NAME, {"weight": TensorInfo((256, 256), "bfloat16")}) is None
    assert FP8.accepts(expected) == []
    storages: dict[str, Linear] = {"lm_head": Dense(), NAME: expected}
    again = json.loads(json.dumps(FP8.config(storages)))
    assert again == {**config, "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize(
    ("changes", "tensors", "named"),
    [
        ({"activation_scheme": "token"}, {}, "activation_scheme: 'token' is not supported; supported: dynamic, static"),
        ({"fmt": "e5m2"}, {}, "fmt: 'e5m2' is not supported; supported: e4m3"),
        ({"weight_block_size": [128]}, {}, r"weight_block_size must be \[rows, columns\] or null"),
        ({"weight_block_size": "128"}, {}, "weight_block_size must be a list"),
        ({}, {"weight_scale_inv": TensorInfo((2, 2), "int32")}, f"weight_scale_inv of {NAME} is int32; supported: float32"),
    ],
)
def test_fp8_schemes_that_cannot_be_held(changes: dict[str, Any], tensors: dict[str, TensorInfo], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        FP8.storage(fp8_config(**changes), NAME, IN_FP8 | tensors)


def test_fp8_refuses_what_its_config_cannot_say() -> None:
    for storage in (PackedFloat(), replace(BLOCK, inputs=None), replace(BLOCK, element="e5m2"), ALGORITHMS["NVFP4"], Dense()):
        (reason,) = FP8.accepts(storage)
        assert reason.startswith("fp8_block holds")
    with pytest.raises(ValueError, match="one scheme for all modules, but a and b differ"):
        FP8.config({"a": BLOCK, "b": TENSOR, "c": Dense()})


@pytest.mark.parametrize("storage", [BLOCK, TENSOR, STATIC, POWERS], ids=str)
@pytest.mark.parametrize("outputs", [1, 200])
def test_fp8_decode_inverts_encode(storage: PackedFloat, outputs: int) -> None:
    ours = draw(storage, outputs=outputs)
    theirs = FP8.encode(storage, ours, 256, outputs)
    assert list(theirs) == FP8.disk_names(storage, True)
    assert theirs["weight"].dtype == torch.float8_e4m3fn
    again = FP8.decode(storage, theirs, 256, outputs)
    assert all(torch.equal(again[n], ours[n]) and again[n].dtype == ours[n].dtype for n in ours)


def test_fp8_blocks_stand_for_the_published_weights() -> None:
    """W = w * weight_scale_inv by blocks, those at the edges cut; the scale is largest / 448."""
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    scale = scaled.fit(weight, BLOCK.grid)
    assert scale[1, 2] == weight[128:, 256:].abs().max() / 448
    module = BLOCK.build(300, 200, False)
    module.hold(BLOCK.encode(weight, scale))
    theirs = FP8.encode(BLOCK, module.canonical(), 300, 200)
    assert torch.equal(module.dense_weight(), from_fp8(theirs["weight"], theirs["weight_scale_inv"], [128, 128]))


@pytest.mark.parametrize("options", [{"scale_per": "block", "inputs": "group"}, {"scale_per": "tensor", "inputs": "tensor"}], ids=str)
def test_a_saved_fp8_model_is_the_one_in_memory(options: dict[str, Any], tmp_path: Path) -> None:
    model = saved(tmp_path, "fp8", "fp8_block", ["layers.1.*.k=keep"], **options)
    assert verify(model, tmp_path / "quantized").logit_difference == 0
    again = zoo.load(tmp_path / "quantized")
    assert again.spec == model.spec
    assert same_bits(again, model)


@torch.no_grad()
def test_transformers_reads_a_saved_fp8_model(tmp_path: Path) -> None:
    """Without a GPU it decodes the weights to bfloat16."""
    from transformers import AutoModelForCausalLM

    model = saved(tmp_path, "fp8", "fp8_block", ["layers.1.*.k=keep"], scale_per="block", inputs="group")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.bfloat16)
    for name, path in (("0.mlp.down_proj", "0.mlp.down"), ("1.self_attn.q_proj", "1.mixer.projection.q"), ("1.mlp.up_proj", "1.mlp.up")):
        ours = model.get_submodule(f"layers.{path}").dense_weight(torch.bfloat16)  # type: ignore[operator]
        torch.testing.assert_close(theirs.get_submodule(f"model.layers.{name}").weight.data, ours, rtol=2**-7, atol=0)


def test_what_is_not_one_to_one_is_read_as_plain_weights(tmp_path: Path) -> None:
    """Phi-3 keeps q, k and v in one tensor, and gate and up: those become plain, the others stay packed."""
    Case("phi3", "Phi3ForCausalLM", {"pad_token_id": 0}).write(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain/model.safetensors")
    packed = dict(tensors)
    for name in (n for n in tensors if n.endswith("_proj.weight")):
        scale = torch.rand(-(-tensors[name].shape[0] // 16), -(-tensors[name].shape[1] // 16)) / 8
        packed |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
        tensors[name] = from_fp8(packed[name], scale, [16, 16])
    config = json.loads((tmp_path / "plain/config.json").read_text())
    for folder, held, extra in (("exact", tensors, {}), ("fp8", packed, {"quantization_config": fp8_config(weight_block_size=[16, 16])})):
        (tmp_path / folder).mkdir()
        save_file(held, tmp_path / folder / "model.safetensors", {"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps(config | extra))
    exact, found = zoo.load(tmp_path / "exact"), zoo.load(tmp_path / "fp8")
    kinds = {path.split(".")[-1]: child.spec.name for path, child in zoo.weights.linears(found.spec) if path.startswith("layers.0")}
    assert kinds == {"q": "dense", "k": "dense", "v": "dense", "o": "packed_float", "gate": "dense", "up": "dense", "down": "packed_float"}
    for path, _ in zoo.weights.linears(exact.spec):
        ours, plain = (m.get_submodule(path).dense_weight(torch.float32) for m in (found, exact))  # type: ignore[operator]
        assert torch.equal(ours, plain), path


def test_fp8_is_never_the_models_dtype(tmp_path: Path) -> None:
    saved(tmp_path, "fp8", "fp8_block", scale_per="block", inputs="group")
    file = tmp_path / "quantized/config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k not in ("dtype", "torch_dtype")}))
    assert zoo.load(tmp_path / "quantized").dtype == torch.float32


def test_a_scale_of_another_shape_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "fp8", "fp8_block", scale_per="block", inputs="group")
    file = tmp_path / "quantized/model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"{NAME}.weight_scale_inv": torch.ones(2, 2)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{NAME}\.weight_scale_inv must be there, \[1, 1\]"):
        zoo.load(tmp_path / "quantized")


# ---- Model Optimizer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_modelopt_configs_are_read(algorithm: str) -> None:
    nested = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head", "*k_proj"]}
    old = {"producer": {"name": "modelopt", "version": "0.33"}, "quant_method": "modelopt", "quantization": nested}
    new = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*k_proj"], "config_groups": {}}
    for config in (old, new):
        assert format_for(config) == OPT
        assert OPT.storage(config, NAME, {}) == ALGORITHMS[algorithm]
        assert OPT.storage(config, "lm_head", {}) is None
        assert OPT.storage(config, "model.layers.3.self_attn.k_proj", {}) is None


def test_modelopt_mixed_algorithms() -> None:
    storages: dict[str, Linear] = {"a": ALGORITHMS["NVFP4"], "b": ALGORITHMS["FP8"], "lm_head": Dense()}
    config = json.loads(json.dumps(OPT.config(storages)))
    assert config["quant_algo"] == "MIXED_PRECISION"
    assert config["quantized_layers"] == {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}
    for name, storage in storages.items():
        assert OPT.storage(config, name, {}) == (None if isinstance(storage, Dense) else storage)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quant_algo": "W4A16_AWQ"}, r"quant_algo: 'W4A16_AWQ' is not supported; supported: NVFP4, W4A16_NVFP4, FP8, MIXED_PRECISION"),
        ({"quant_algo": None}, "quant_algo: None is not supported"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, r"quantization\.kv_cache_quant_algo is not supported"),
        ({"ignore": [3]}, r"ignore\.0 must be a string"),
    ],
)
def test_modelopt_configs_that_cannot_be_held(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        OPT.storage({"quant_method": "modelopt", "quant_algo": "NVFP4"} | changes, NAME, {})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("outputs", [1, 200])
def test_modelopt_decode_inverts_encode(algorithm: str, outputs: int) -> None:
    storage = ALGORITHMS[algorithm]
    ours = draw(storage, outputs=outputs)
    theirs = OPT.encode(storage, ours, 256, outputs)
    assert list(theirs) == OPT.disk_names(storage, True)
    again = OPT.decode(storage, theirs, 256, outputs)
    assert all(torch.equal(again[n], ours[n]) and again[n].dtype == ours[n].dtype for n in ours)


def test_modelopt_nvfp4_is_code_times_both_scales() -> None:
    """weight_scale_2 is largest / (6 * 448), the group scale is E4M3 of largest / 6 / weight_scale_2, and W their product with the code."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    storage = replace(ALGORITHMS["W4A16_NVFP4"])
    tensor = scaled.fit_tensor(weight.abs().max(), storage.grid)
    held = storage.encode(weight, scaled.fit(weight, storage.grid, tensor), tensor)
    theirs = OPT.encode(storage, held, 64, 32)
    assert theirs["weight"].shape == (32, 32)
    assert theirs["weight_scale_2"].shape == ()
    assert theirs["weight_scale_2"] == weight.abs().max() / (6 * 448)
    groups = weight.unflatten(-1, (-1, 16))
    wanted = (groups.abs().amax(-1) / 6 / theirs["weight_scale_2"]).to(torch.float8_e4m3fn)
    assert torch.equal(theirs["weight_scale"].float(), wanted.float())
    low, high = theirs["weight"] & 15, theirs["weight"] >> 4
    codes = floats.decode(torch.stack((low, high), -1).flatten(-2), storage.grid.element)
    product = codes.unflatten(-1, (-1, 16)) * (wanted.float() * theirs["weight_scale_2"])[..., None]
    module = storage.build(64, 32, False)
    module.hold(held)
    assert torch.equal(module.dense_weight(), product.flatten(-2))


@pytest.mark.parametrize(
    ("method", "options"),
    [("nvfp4", {"round_inputs": True, "tensor_scale": "multiplier"}), ("nvfp4", {"tensor_scale": "multiplier"}),
     ("fp8", {"scale_per": "tensor", "inputs": "tensor"})],
    ids=str,
)  # fmt: skip
def test_a_saved_modelopt_model_is_the_one_in_memory(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = saved(tmp_path, method, "modelopt", ["layers.1.*.k=keep"], **options)
    assert verify(model, tmp_path / "quantized").logit_difference == 0
    again = zoo.load(tmp_path / "quantized")
    assert again.spec == model.spec
    assert same_bits(again, model)


def test_modelopt_refuses_other_storages(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"modelopt does not hold .*quantize with nvfp4 with tensor_scale='multiplier'"):
        saved(tmp_path, "nvfp4", "modelopt")
