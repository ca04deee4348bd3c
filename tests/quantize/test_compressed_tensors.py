"""The compressed-tensors format, against the library of that name and transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.quantize.models import ids, same_bits
from tests.zoo.oracle import llama_checkpoint, relative_error
from zoo.components.contracts import Linear
from zoo.components.linear.dense import Dense
from zoo.components.linear.packed_int import PackedInt
from zoo.components.numerics import integer
from zoo.components.ops.packed_matmul.reference import Reference
from zoo.components.spec import TensorInfo
from zoo.quantize import quantize, verify
from zoo.quantize.formats.compressed_tensors import CompressedTensors
from zoo.storages import format_for

FORMAT = CompressedTensors()
STORAGES = [PackedInt(bits=b, group_size=g, symmetric=s) for b, g, s in product((2, 3, 4, 5, 8), (None, 32), (True, False))]
NAME = "model.layers.0.mlp.down_proj"


def scheme(**weights: Any) -> dict[str, Any]:
    """A config with one group for all linear modules, as llm-compressor writes it."""
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False, "observer": "minmax"}
    group = {"targets": ["Linear"], "weights": args | weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


# ---- tensors -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("inputs", [64, 96])
def test_tensors_are_those_that_the_library_writes_and_reads(storage: PackedInt, inputs: int) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    weight = torch.randn(40, inputs, generator=torch.Generator().manual_seed(0))
    scale, zero = integer.fit(weight, storage.grid)
    codes = integer.quantize(weight, scale, zero, storage.bits)
    rounded = integer.dequantize(codes, scale, zero, torch.float32)
    ours = FORMAT.encode(storage, storage.encode(codes, scale, zero), inputs, 40)
    assert ours.keys() == set(FORMAT.disk_names(storage, bias=False))

    args = QuantizationScheme(targets=["Linear"], weights=FORMAT.config({NAME: storage})["config_groups"]["group_0"]["weights"])
    offset = 2 ** (storage.bits - 1)
    held = {"weight": rounded, "weight_scale": scale.float(), "weight_zero_point": (zero.int() - offset).to(torch.int8)}
    theirs = PackedQuantizationCompressor.compress(held, args)
    assert ours.keys() == theirs.keys()
    for name in theirs.keys() - {"weight_scale"}:
        assert torch.equal(ours[name], theirs[name]), name
    exact = {name: tensor.clone() for name, tensor in ours.items()} | {"weight_scale": scale.float()}
    assert torch.equal(PackedQuantizationCompressor.decompress(exact, args)["weight"], rounded)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_decode_inverts_encode(storage: PackedInt, bias: bool) -> None:
    infos = storage.own_tensors(96, 40, bias)
    ours = {n: torch.randint(0, 99, i.shape).to(getattr(torch, i.dtype or "float32")) for n, i in infos.items()}
    theirs = FORMAT.encode(storage, ours, 96, 40)
    assert list(theirs) == FORMAT.disk_names(storage, bias)
    again = FORMAT.decode(storage, theirs, 96, 40)
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[n], ours[n]) and again[n].dtype == ours[n].dtype for n in ours)


def test_wrong_shapes_are_named() -> None:
    storage = PackedInt(bits=3, group_size=32)
    ours = {n: torch.zeros(i.shape, dtype=getattr(torch, i.dtype or "float32")) for n, i in storage.own_tensors(64, 8, False).items()}
    theirs = FORMAT.encode(storage, ours, 64, 8)
    with pytest.raises(ValueError, match=r"weight_shape says \[8, 64\], the model has \[8, 96\]"):
        FORMAT.decode(storage, theirs, 96, 8)
    with pytest.raises(ValueError, match=r"weight_packed is \[8, 7\], a weight of \[8, 64\] has \[8, 6\]"):  # 3 bits padded to words
        FORMAT.decode(storage, theirs | {"weight_packed": torch.zeros(8, 7)}, 64, 8)


# ---- configs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, PackedInt(bits=4, group_size=128)),
        ({"strategy": "channel", "group_size": None, "num_bits": 8}, PackedInt(bits=8)),
        ({"strategy": "channel", "group_size": -1}, PackedInt(bits=4)),
        ({"strategy": None, "group_size": -1}, PackedInt(bits=4)),
        ({"symmetric": False, "group_size": 32, "actorder": "weight"}, PackedInt(bits=4, group_size=32, symmetric=False)),
    ],
)
def test_schemes_are_read(weights: dict[str, Any], expected: PackedInt) -> None:
    weights = {k: v for k, v in weights.items() if not (k == "strategy" and v is None)}
    config = scheme(**weights)
    if "strategy" not in weights and weights.get("group_size") == -1:
        del config["config_groups"]["group_0"]["weights"]["strategy"]
    assert FORMAT.storage(config, NAME, {}) == expected
    assert FORMAT.storage(config, "lm_head", {}) is None
    assert format_for(config) == FORMAT


@pytest.mark.parametrize(("on_disk", "expected"), [("bfloat16", None), ("float16", "float16"), ("float32", "float32")])
def test_the_scales_dtype_is_that_on_disk(on_disk: str, expected: Any) -> None:
    storage = FORMAT.storage(scheme(), NAME, {"weight_scale": TensorInfo((8, 4), on_disk)})
    assert storage == PackedInt(bits=4, group_size=128, scale_dtype=expected)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"type": "float"}, r"config_groups\.group_0\.weights\.type: 'float' is not supported"),
        ({"num_bits": 1}, r"weights\.num_bits: 1"),
        ({"strategy": "tensor"}, r"weights\.strategy: 'tensor' is not supported; supported: group, channel"),
        ({"group_size": None}, r"weights\.group_size: a positive number is needed, got None"),
        ({"actorder": "group"}, r"weights\.actorder: 'group'"),
        ({"dynamic": True}, r"weights\.dynamic: True"),
    ],
)
def test_schemes_that_cannot_be_held(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        FORMAT.storage(scheme(**change), NAME, {})


def test_other_things_that_cannot_be_held() -> None:
    with pytest.raises(ValueError, match="transform_config is not supported"):
        FORMAT.storage(scheme() | {"transform_config": {"config_groups": {}}}, NAME, {})
    with pytest.raises(ValueError, match="format: 'marlin-24' is not supported; supported: pack-quantized, "):
        FORMAT.storage(scheme() | {"format": "marlin-24"}, NAME, {})
    with pytest.raises(ValueError, match=r"weights\.type: 'int' is not supported; supported: float; .*weights\.num_bits: 4"):
        FORMAT.storage(scheme() | {"format": "float-quantized"}, NAME, {})
    with pytest.raises(ValueError, match="weight_g_idx"):
        FORMAT.storage(scheme(), NAME, {"weight_g_idx": TensorInfo((8,), "int32")})
    with pytest.raises(ValueError, match=r"config_groups\.W4A16 is a preset"):
        FORMAT.storage({"config_groups": {"W4A16": ["Linear"]}}, NAME, {})
    activations = scheme()
    activations["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(ValueError, match="input_activations"):
        FORMAT.storage(activations, NAME, {})


@pytest.mark.parametrize(
    ("targets", "ignore", "expected"),
    [
        ([["Linear"], [NAME]], [], 1),
        ([["Linear"], [r"re:.*\.mlp\..*"]], [], 1),
        ([[r"re:.*down_proj$"], [r"re:.*mlp.*"]], [], 0),  # expressions are tried in their order as strings
        ([[r"re:.*mlp.*"], [r"re:.*down_proj$"]], [], 1),
        ([["Linear"], [r"re:layers"]], [], 0),  # an expression holds from the start of the name
        ([["Linear"], [NAME]], [NAME], None),
        ([["Linear"], [NAME]], ["re:.*mlp"], None),
        ([["Linear"]], ["Linear"], None),
        ([["Embedding"], ["re:.*attn.*"]], [], None),
    ],
)
def test_targets_are_matched_as_by_the_library(targets: list[list[str]], ignore: list[str], expected: int | None) -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    groups = {f"group_{i}": {**scheme(num_bits=i + 2)["config_groups"]["group_0"], "targets": t} for i, t in enumerate(targets)}
    found = FORMAT.storage(scheme() | {"config_groups": groups, "ignore": ignore}, NAME, {})
    assert (found.bits - 2 if found else None) == expected
    linear, flat = torch.nn.Linear(2, 2), [t for group in targets for t in group]
    assert match.is_match(NAME, linear, flat, ignore) == (expected is not None)
    if expected is not None:
        assert match.match_targets(NAME, linear, flat)[0] in targets[expected]


def test_mixed_storages_become_groups() -> None:
    storages: dict[str, Linear] = {f"model.layers.{i}.{n}": PackedInt(bits=4, group_size=32) for i in range(3) for n in ("q", "k", "o")}
    storages |= {
        "model.layers.0.q": PackedInt(bits=8),
        "model.layers.1.q": PackedInt(bits=8, matmul=Reference()),
        "lm_head": Dense(),
        "model.layers.2.o": Dense(),
    }
    config = json.loads(json.dumps(FORMAT.config(storages)))
    assert set(config["ignore"]) == {"model.layers.2.o", "lm_head"}
    assert sorted(g["targets"] for g in config["config_groups"].values()) == [["Linear"], ["model.layers.0.q", "model.layers.1.q"]]
    for name, storage in storages.items():
        assert FORMAT.storage(config, name, {}) == (None if isinstance(storage, Dense) else replace(storage, matmul=None))


def test_other_storages_are_refused() -> None:
    assert FORMAT.accepts(PackedInt()) == []
    assert FORMAT.accepts(Dense()) == ["compressed-tensors has no scheme for dense"]


# ---- whole models ------------------------------------------------------------------------------------------------------------


def saved(folder: Path, rules: list[str], **settings: Any) -> zoo.Model:
    llama_checkpoint(folder / "model", hidden_size=64, intermediate_size=96, head_dim=16, max_position_embeddings=64, attention_bias=True)
    model = zoo.load(folder / "model")
    quantize(model, progress=False, rules=rules, **settings)
    zoo.save(model, folder / "quantized")
    return model


MIXED = ["layers.0.*={bits: 8, group_size: null}", "layers.1.*.k=keep", "layers.1.*.o={bits: 3}"]


@pytest.mark.parametrize("rules", [[], MIXED, [*MIXED, "*.mlp.down={symmetric: false}"]], ids=str)
def test_a_saved_model_is_the_one_in_memory(rules: list[str], tmp_path: Path) -> None:
    model = saved(tmp_path, rules, method="gptq", group_size=32, calibration=ids())
    found = verify(model, tmp_path / "quantized")
    assert found.logit_difference == 0
    again = zoo.load(tmp_path / "quantized")
    assert again.spec == model.spec
    assert same_bits(again, model)


@pytest.mark.parametrize("rules", [[], MIXED], ids=str)
def test_transformers_loads_a_saved_model(rules: list[str], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    model = saved(tmp_path, rules, method="rtn", group_size=32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.float32)
    x = ids(2, 24)  # more rows than the products that round activations take
    with torch.no_grad():
        assert relative_error(model(x), theirs(x).logits) < 1e-5


def test_a_model_that_the_library_compressed_is_read(tmp_path: Path) -> None:
    """transformers and compressed-tensors write the folder, we read it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    theirs = llama_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96, head_dim=16, max_position_embeddings=64)
    config = QuantizationConfig.model_validate(scheme(group_size=32) | {"quantization_status": "frozen"})
    apply_quantization_config(theirs, config)
    grid = PackedInt(group_size=32, scale_dtype="float32").grid
    expected = {}
    for name, module in theirs.named_modules():
        if hasattr(module, "weight_scale"):
            scale, zero = integer.fit(module.weight, grid)
            module.weight_scale.data.copy_(scale)
            expected[name] = integer.dequantize(integer.quantize(module.weight, scale, zero, 4), scale, zero, torch.float32)
    ModelCompressor.from_pretrained_model(theirs, quantization_format="pack-quantized").compress_model(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": scheme(group_size=32)}))
    down = zoo.load(tmp_path / "theirs").layers[1].mlp.down
    assert down.spec == PackedInt(group_size=32, scale_dtype="float32")
    assert torch.equal(down.dense_weight(torch.float32), expected["model.layers.1.mlp.down_proj"])
