"""The float schemes of compressed-tensors, against the library of that name and transformers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.quantize.models import ids, same_bits
from tests.zoo.oracle import llama_checkpoint, relative_error
from zoo.components.contracts import Linear
from zoo.components.linear.dense import Dense
from zoo.components.linear.packed_float import FloatInputs, PackedFloat
from zoo.components.linear.packed_int import PackedInt
from zoo.components.numerics import scaled
from zoo.components.spec import TensorInfo
from zoo.quantize import quantize, verify
from zoo.quantize.formats.compressed_tensors import CompressedTensors
from zoo.saving import family_of
from zoo.storages import plain_spec
from zoo.weights import entries, linear_names, linears

FORMAT = CompressedTensors()
NAME = "model.layers.0.mlp.down_proj"
TOKEN, FIXED = FloatInputs(), FloatInputs(scale=None, tensor_scale="multiplier")
NV = FloatInputs(element="e2m1", group_size=16, scale="e4m3", tensor_scale="divisor")
MX4, MX8 = (FloatInputs(element=e, group_size=32, scale="e8m0") for e in ("e2m1", "e4m3"))
NVFP4 = PackedFloat(element="e2m1", group_size=16, scale="e4m3", tensor_scale="divisor")
PRESETS = {
    "FP8": PackedFloat(group_outputs=None, inputs=FIXED),
    "FP8_DYNAMIC": PackedFloat(inputs=TOKEN),
    "FP8_BLOCK": PackedFloat(group_outputs=128, group_size=128, inputs=FloatInputs(group_size=128)),
    "NVFP4A16": NVFP4,
    "NVFP4": replace(NVFP4, inputs=NV),
    "MXFP4A16": PackedFloat(element="e2m1", group_size=32, scale="e8m0"),
    "MXFP4": PackedFloat(element="e2m1", group_size=32, scale="e8m0", inputs=MX4),
    "MXFP4XFP8": PackedFloat(element="e2m1", group_size=32, scale="e8m0", inputs=FloatInputs(group_size=128)),
    "MXFP6A16": PackedFloat(element="e2m3", group_size=32, scale="e8m0"),
    "MXFP6A8": PackedFloat(element="e2m3", group_size=32, scale="e8m0", inputs=MX8),
    "MXFP8A16": PackedFloat(group_size=32, scale="e8m0"),
    "MXFP8": PackedFloat(group_size=32, scale="e8m0", inputs=MX8),
}
FP8_ONLY = PackedFloat(scale="bfloat16")  # naive-quantized
STORAGES = [*PRESETS.values(), FP8_ONLY, PackedFloat(group_size=64, inputs=FloatInputs(group_size=64))]


def preset(name: str) -> tuple[Any, dict[str, Any]]:
    """The library's scheme, with the format that it infers, and the config that it writes."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme = preset_name_to_scheme(name, ["Linear"])
    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=scheme.format.value)
    return scheme, json.loads(config.model_dump_json()) | {"quant_method": "compressed-tensors"}


def draw(storage: PackedFloat, inputs: int = 128, outputs: int = 40) -> dict[str, torch.Tensor]:
    """Random tensors of a storage; codes that are NaN are left out."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, info in storage.own_tensors(inputs, outputs, True).items():
        codes = torch.randint(120, info.shape, generator=generator, dtype=torch.uint8)
        found[name] = codes if info.dtype == "uint8" else codes.to(getattr(torch, info.dtype or "float32"))
    return found


# ---- configs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_the_librarys_presets_are_read(name: str) -> None:
    _, config = preset(name)
    assert FORMAT.storage(config, NAME, {}) == PRESETS[name]
    assert FORMAT.storage(config, "lm_head", {}) is None


@pytest.mark.parametrize("name", PRESETS)
def test_written_configs_are_the_librarys(name: str) -> None:
    scheme, _ = preset(name)
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads(json.dumps(FORMAT.config({NAME: PRESETS[name], "lm_head": Dense()})))
    theirs = QuantizationConfig.model_validate({k: v for k, v in config.items() if k != "quant_method"})
    (group,) = theirs.config_groups.values()
    assert group.format == scheme.format.value == config["format"]
    kept = {"num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "block_structure", "scale_dtype"}
    for ours, wanted in ((group.weights, scheme.weights), (group.input_activations, scheme.input_activations)):
        assert (ours is None) == (wanted is None)
        if ours is not None:
            assert {k: getattr(ours, k) for k in kept} == {k: getattr(wanted, k) for k in kept}


def test_mixed_storages_become_groups_with_formats_of_their_own() -> None:
    storages: dict[str, Linear] = {f"model.layers.{i}.{n}": PRESETS["NVFP4"] for i in range(3) for n in ("q", "k")}
    storages |= {"model.layers.0.q": PackedInt(bits=8), "model.layers.1.q": PRESETS["FP8_DYNAMIC"], "lm_head": Dense()}
    config = json.loads(json.dumps(FORMAT.config(storages)))
    assert config["format"] == "mixed-precision"
    assert {g["format"] for g in config["config_groups"].values()} == {"nvfp4-pack-quantized", "pack-quantized", "float-quantized"}
    for name, storage in storages.items():
        assert FORMAT.storage(config, name, {}) == (None if isinstance(storage, Dense) else storage)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_scales_dtype_is_that_on_disk(dtype: str) -> None:
    found = FORMAT.storage(preset("FP8_DYNAMIC")[1], NAME, {"weight_scale": TensorInfo((40, 1), dtype)})
    assert found == replace(PRESETS["FP8_DYNAMIC"], scale=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "part", "change", "named"),
    [
        ("FP8_DYNAMIC", "weights", {"symmetric": False}, r"group_0\.weights\.symmetric: False is not supported"),
        ("FP8_DYNAMIC", "weights", {"num_bits": 4}, r"group_0\.weights\.num_bits: 4 is not supported; supported: 8"),
        ("FP8_BLOCK", "weights", {"block_structure": None}, r"weights\.block_structure is missing"),
        ("FP8_BLOCK", "weights", {"block_structure": [128, 0]}, r"weights\.block_structure must be \[outputs, inputs\]"),
        ("FP8_DYNAMIC", "input_activations", {"strategy": "tensor"}, r"input_activations\.dynamic: True is not supported"),
        ("FP8_DYNAMIC", "input_activations", {"type": "int"}, r"input_activations\.type: 'int' is not supported"),
        ("FP8_DYNAMIC", "output_activations", {"num_bits": 8}, "output_activations: rounded outputs are not supported"),
        ("NVFP4", "weights", {"group_size": 32}, r"weights\.group_size: 32 is not supported; supported: 16"),
        ("NVFP4", "input_activations", {"dynamic": False}, r"input_activations\.dynamic: False is not supported; supported: local"),
        ("MXFP8", "input_activations", {"group_size": 64}, r"input_activations\.group_size: powers of two as scales are for groups of 32"),
        ("MXFP8", "weights", {"scale_dtype": None}, r"weights\.scale_dtype is missing; supported: torch\.uint8"),
        ("MXFP4", "input_activations", {"num_bits": True}, r"input_activations\.num_bits: True"),
    ],
)
def test_schemes_that_cannot_be_held_are_named(name: str, part: str, change: dict[str, Any], named: str) -> None:
    _, config = preset(name)
    group = config["config_groups"]["group_0"]
    group[part] = (group[part] or {}) | change
    with pytest.raises(ValueError, match=named):
        FORMAT.storage(config, NAME, {})


@pytest.mark.parametrize(
    ("storage", "reason"),
    [
        (PackedFloat(element="e5m2"), "has no scheme for .*e5m2"),
        (PackedFloat(element="e3m2", group_size=32, scale="e8m0"), "has no scheme for .*e3m2"),
        (replace(NVFP4, tensor_scale="multiplier"), "has no scheme for .*multiplier"),
        (PackedFloat(group_size=64, scale="e8m0"), "has no scheme for"),
        (PackedFloat(inputs=FloatInputs(element="e5m2")), "float-quantized cannot say that inputs are rounded to .*e5m2"),
        (replace(NVFP4, inputs=replace(NV, tensor_scale=None)), "nvfp4-pack-quantized cannot say that inputs"),
    ],
)
def test_storages_that_cannot_be_written_are_refused(storage: PackedFloat, reason: str) -> None:
    (found,) = FORMAT.accepts(storage)
    assert re.search(reason, found)


# ---- tensors -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 40), (256, 1), (256, 256)])
def test_decode_inverts_encode(storage: PackedFloat, inputs: int, outputs: int) -> None:
    ours = draw(storage, inputs, outputs)
    assert FORMAT.accepts(storage) == []
    theirs = FORMAT.encode(storage, ours, inputs, outputs)
    assert list(theirs) == FORMAT.disk_names(storage, True)
    again = FORMAT.decode(storage, theirs, inputs, outputs)
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[n], ours[n]) and again[n].dtype == ours[n].dtype for n in ours)


@pytest.mark.parametrize("name", PRESETS)
def test_tensors_are_those_that_the_library_writes_and_reads(name: str) -> None:
    scheme, _ = preset(name)
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
    storage = replace(PRESETS[name], inputs=None)
    module = storage.build(256, 128, False)
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    method = {"divisor": torch.tensor([7.0])} if storage.tensor_scale else {}
    stored = scaled.fit(weight, storage.grid, method.get("divisor"))
    module.hold(storage.encode(weight, stored, method.get("divisor")))
    ours = FORMAT.encode(storage, module.canonical(), 256, 128)
    per_block = scaled.effective(stored, None, storage.grid)
    shape = ours["weight_scale"].shape
    held = {"weight": weight, "weight_scale": per_block.view(shape)} | ({"weight_global_scale": method["divisor"]} if method else {})
    theirs = compressor.compress(held, scheme)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype, key
        assert ours[key].shape == tensor.shape, key
        assert torch.equal(ours[key].view(torch.uint8), tensor.view(torch.uint8)), key
    read = compressor.decompress({n: t.clone() for n, t in ours.items()}, scheme)["weight"]
    assert torch.equal(read.bfloat16(), module.dense_weight(torch.bfloat16))


def test_wrong_tensors_are_named() -> None:
    storage = PRESETS["FP8_DYNAMIC"]
    theirs = FORMAT.encode(storage, draw(storage), 128, 40)
    with pytest.raises(ValueError, match=r"weight is \[40, 128\], a weight of \[40, 96\] has \[40, 96\]"):
        FORMAT.decode(storage, theirs, 96, 40)
    with pytest.raises(ValueError, match="weight is uint8, it must be float8_e4m3fn"):
        FORMAT.decode(storage, theirs | {"weight": theirs["weight"].view(torch.uint8)}, 128, 40)
    with pytest.raises(ValueError, match=r"weight_scale is \[20, 2\]"):
        FORMAT.decode(storage, theirs | {"weight_scale": theirs["weight_scale"].view(20, 2)}, 128, 40)


# ---- whole models ------------------------------------------------------------------------------------------------------------

MIXED = ["layers.0.*={name: fp8, inputs: token}", "layers.1.*.k=keep", "layers.1.*.o={name: rtn, bits: 4, group_size: 32}"]
METHODS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "fp8 channel": ("fp8", {}, []),
    "fp8 token": ("fp8", {"inputs": "token"}, []),
    "fp8 fixed": ("fp8", {"inputs": "tensor", "scale_per": "tensor"}, []),
    "fp8 block": ("fp8", {"scale_per": "block"}, []),
    "nvfp4": ("nvfp4", {}, []),
    "nvfp4 four over six": ("nvfp4", {"four_over_six": True}, []),
    "nvfp4 inputs": ("nvfp4", {"round_inputs": True}, []),
    "mxfp4 inputs": ("mxfp", {"input_element": "e2m1"}, []),
    "mxfp6": ("mxfp", {"element": "e2m3", "input_element": "e4m3"}, []),
    "mxfp8": ("mxfp", {"element": "e4m3", "input_element": "e4m3", "scale_rule": "ceil"}, []),
    "mixed": ("nvfp4", {"round_inputs": True}, MIXED),
}


def saved(folder: Path, name: str) -> zoo.Model:
    llama_checkpoint(folder / "model", hidden_size=64, intermediate_size=96, head_dim=16, max_position_embeddings=64, attention_bias=True)
    model = zoo.load(folder / "model")
    method, options, rules = METHODS[name]
    quantize(model, method, calibration=ids(), rules=rules, progress=False, **options)
    zoo.save(model, folder / "quantized")
    return model


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_model_is_the_one_in_memory(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, name)
    assert verify(model, tmp_path / "quantized").logit_difference == 0
    again = zoo.load(tmp_path / "quantized")
    assert again.spec == model.spec
    assert same_bits(again, model)


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_transformers_reads_a_saved_model(name: str, tmp_path: Path) -> None:
    """The library decodes some schemes to bfloat16 only; with the exact weights in their place all else is computed as by us."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    saved(tmp_path, name)
    ours = zoo.load(tmp_path / "quantized", dtype="bfloat16").float()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.bfloat16)
    x = ids(2, 24)
    theirs(x)  # unpacks the weights
    torch.nn.Module.float(theirs)
    names = linear_names(entries(plain_spec(ours.spec), family_of(ours.spec).rules(ours.spec)))
    for path in (path for path, child in linears(ours.spec) if child.spec.name != "dense"):
        module, own = theirs.get_submodule(names[path]), ours.get_submodule(path)
        pairs = {"weight": own.dense_weight(torch.float32)}  # type: ignore[operator]
        pairs |= {"input_scale": own.get_buffer("input_multiplier")} if hasattr(own, "input_multiplier") else {}
        for leaf, exact in pairs.items():
            torch.testing.assert_close(getattr(module, leaf).data, exact, rtol=2**-7, atol=0)
            getattr(module, leaf).copy_(exact)
    assert relative_error(ours(x), theirs(x).logits) < 1e-5


def test_dequantized_weights_are_those_of_the_packed_ones(tmp_path: Path) -> None:
    model = saved(tmp_path, "mixed")
    plain = zoo.load(tmp_path / "quantized", quantized="dequantize")
    for path in ("layers.0.mlp.down", "layers.1.mlp.up", "layers.1.mixer.projection.o"):
        assert torch.equal(plain.get_submodule(path).weight, model.get_submodule(path).dense_weight(torch.float32))  # type: ignore[operator]
