"""Checkpoints in the layouts of AutoGPTQ, GPTQModel and AutoAWQ."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo
from tests.quantize.models import ids
from tests.zoo.oracle import llama_checkpoint, relative_error
from zoo.checkpoint import CheckpointError
from zoo.components.linear.packed_int import PackedInt
from zoo.components.numerics import integer
from zoo.components.spec import TensorInfo
from zoo.quantize import quantize
from zoo.quantize.formats.awq import AWQFormat
from zoo.quantize.formats.gptq import GPTQFormat
from zoo.quantize.formats.gptq_v2 import GPTQv2Format

V1, V2, AWQ = GPTQFormat(), GPTQv2Format(), AWQFormat()
NAME = "model.layers.0.mlp.down_proj"


def weights(storage: PackedInt, inputs: int = 64, outputs: int = 32) -> dict[str, Tensor]:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    scale, zero = integer.fit(weight, storage.grid)
    zero = zero.clamp(min=1)  # which version 1 can hold
    held = storage.encode(integer.quantize(weight, scale, zero, storage.bits), scale, zero)
    if storage.scattered:
        held["group_index"] = torch.randperm(inputs, generator=torch.Generator().manual_seed(1)).int() // (storage.group_size or inputs)
    return held


# ---- words -------------------------------------------------------------------------------------------------------------------


def test_gptq_words_are_those_of_the_reference() -> None:
    """Eight inputs of one output, 0 to 7, lie lowest first in a word; a symmetric zero point is 7 in version 1 and 8 in version 2."""
    codes = torch.arange(8, dtype=torch.uint8).repeat(32, 1)
    storage = PackedInt(group_size=8, scale_dtype="float16")
    held = storage.encode(codes, torch.ones(32, 1, dtype=torch.float16), torch.zeros(32, 1, dtype=torch.uint8))
    first, second = (f.encode(storage, held, 8, 32) for f in (V1, V2))
    assert first["qweight"].shape == (1, 32)
    assert first["qweight"][0, 0] == 0x76543210
    assert set(first["qzeros"].flatten().tolist()) == {0x77777777}
    assert {w & 0xFFFFFFFF for w in second["qzeros"].flatten().tolist()} == {0x88888888}


@pytest.mark.parametrize(("bits", "step"), [(2, 0x55555555), (4, 0x11111111), (8, 0x01010101)])
def test_zero_points_of_the_two_versions_differ_by_one_in_each_field(bits: int, step: int) -> None:
    storage = PackedInt(bits=bits, group_size=32, symmetric=False, scale_dtype="float16")  # type: ignore[arg-type]
    held = weights(storage)
    first, second = (f.encode(storage, held, 64, 32)["qzeros"].long() & 0xFFFFFFFF for f in (V1, V2))
    assert torch.equal(first + step, second)


def test_awq_words_are_those_of_the_reference() -> None:
    codes = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 8)  # output n holds n
    storage = PackedInt(group_size=8, symmetric=False, scale_dtype="float16")
    held = storage.encode(codes, torch.ones(8, 1, dtype=torch.float16), torch.arange(8, dtype=torch.uint8)[:, None])
    found = AWQ.encode(storage, held, 8, 8)
    assert set(found["qweight"].flatten().tolist()) == set(found["qzeros"].flatten().tolist()) == {0x75316420}


@pytest.mark.parametrize("format", [V1, V2], ids=lambda f: f.name)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "kind", [{}, {"symmetric": False}, {"group_size": None}, {"scattered": True}, {"scattered": True, "symmetric": False}], ids=str
)
def test_gptq_tensors_return_to_the_bit(format: GPTQFormat, bits: int, kind: dict[str, Any]) -> None:
    storage = replace(PackedInt(bits=bits, group_size=32, scale_dtype="float16"), **kind)  # type: ignore[arg-type]
    held = weights(storage)
    disk = format.encode(storage, held, 64, 32)
    again = format.decode(storage, disk, 64, 32)
    assert disk.keys() == set(format.disk_names(storage, False))
    assert held.keys() == again.keys()
    assert all(torch.equal(held[n], again[n]) for n in held)
    infos = {n: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in disk.items()}
    assert format.storage(format.config({NAME: storage}), NAME, infos) == storage


@pytest.mark.parametrize("size", [16, None])
def test_awq_tensors_return_to_the_bit(size: int | None) -> None:
    storage = PackedInt(group_size=size, symmetric=False, scale_dtype="float16")
    held = weights(storage)
    again = AWQ.decode(storage, AWQ.encode(storage, held, 64, 32), 64, 32)
    assert all(torch.equal(held[n], again[n]) for n in held)
    assert AWQ.storage(AWQ.config({NAME: storage}), NAME, {}) == storage


def test_the_formula_of_the_reference(tmp_path: Path) -> None:
    """W[o, i] = scales[g_idx[i], o] * (q[i, o] - z[g_idx[i], o])."""
    storage = PackedInt(group_size=16, symmetric=False, scale_dtype="float16", scattered=True)
    held = weights(storage)
    disk = V2.encode(storage, held, 64, 32)
    q = torch.stack([disk["qweight"] >> 4 * i & 15 for i in range(8)], 1).flatten(0, 1)  # [K, N]
    z = torch.stack([disk["qzeros"] >> 4 * i & 15 for i in range(8)], 2).flatten(1)  # [G, N]
    expected = (disk["scales"].float()[disk["g_idx"]] * (q - z[disk["g_idx"]])).t()
    module = storage.build(64, 32, False)
    module.hold(held)
    assert torch.equal(module.dense_weight(torch.float32), expected)
    x = torch.randn(3, 64)
    assert relative_error(module(x), x @ expected.t()) < 1e-6


# ---- whole models ------------------------------------------------------------------------------------------------------------


def written(folder: Path, format: str, **settings: Any) -> zoo.Model:
    llama_checkpoint(folder / "model", hidden_size=64, intermediate_size=96, head_dim=16, max_position_embeddings=64, attention_bias=True)
    model = zoo.load(folder / "model")
    quantize(model, "rtn", progress=False, group_size=32, **settings)
    zoo.save(model, folder / "quantized", format=format)
    return model


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= values
    (folder / "config.json").write_text(json.dumps(config))


RULES = ["layers.0.mixer.*={bits: 8, group_size: null}", "layers.1.*.k=keep"]


@pytest.mark.parametrize(("format", "settings"), [
    ("gptq", {"rules": RULES}), ("gptq_v2", {"rules": [*RULES, "*.down={symmetric: false}"]}), ("awq", {"symmetric": False}),
    ("awq", {"rules": ["layers.1.*.k=keep"]}),
], ids=str)  # fmt: skip
def test_a_saved_model_is_the_one_in_memory(format: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = written(tmp_path, format, **settings)
    again = zoo.load(tmp_path / "quantized")
    x = ids(2, 24)
    assert torch.equal(again(x), model(x))
    plain = zoo.load(tmp_path / "quantized", quantized="dequantize")
    assert {c.spec.name for _, c in zoo.weights.linears(plain.spec)} == {"dense"}
    assert "quantization_config" not in plain.config
    assert relative_error(plain(x), model(x)) < 1e-5


def test_numbers_pass_from_format_to_format_unchanged(tmp_path: Path) -> None:
    """AWQ to compressed-tensors to GPTQ version 2 and back to AWQ: the same files in the end."""
    written(tmp_path, "awq", symmetric=False)
    place = tmp_path / "quantized"
    for i, format in enumerate(["compressed_tensors", "gptq_v2", "awq"]):
        model = zoo.load(place)
        place = tmp_path / f"{i}-{format}"
        zoo.save(model, place, format=format)
    first, last = (load_file(folder / "model.safetensors") for folder in (tmp_path / "quantized", place))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[n], last[n]) for n in first)


def test_a_version_1_file_with_zero_points_of_version_2_is_recognised(tmp_path: Path) -> None:
    model = written(tmp_path, "gptq_v2")
    edit(tmp_path / "quantized", checkpoint_format="gptq")
    with pytest.warns(UserWarning, match="qzeros holds the zero points of gptq_v2"):
        again = zoo.load(tmp_path / "quantized")
    assert torch.equal(again(ids(1, 8)), model(ids(1, 8)))


def test_biases_of_zeros_that_no_module_has_are_passed_over(tmp_path: Path) -> None:
    written(tmp_path, "gptq")
    file = tmp_path / "quantized/model.safetensors"
    tensors = load_file(file)
    down = "model.layers.0.mlp.down_proj"
    save_file(tensors | {f"{down}.bias": torch.zeros(64)}, file)
    zoo.load(tmp_path / "quantized")
    save_file(tensors | {f"{down}.bias": torch.ones(64)}, file)
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.layers\.0\.mlp\.down_proj\.bias"):
        zoo.load(tmp_path / "quantized")


@pytest.mark.parametrize(("values", "message"), [
    ({"bits": 5}, r"quantization_config\.bits: 5 is not supported; supported: 2, 3, 4, 8"),
    ({"bits": True}, r"bits: True is not supported"),
    ({"group_size": 0}, r"group_size must be a positive number or -1"),
    ({"sym": "yes"}, r"sym is the text 'yes'; write true"),
    ({"pack_dtype": "int64"}, r"pack_dtype: 'int64' is not supported; supported: int32"),
    ({"checkpoint_format": "marlin"}, r"of no known kind of gptq; known: gptq, gptq_v2"),
    ({"dynamic": {"+:[": {}}}, r"dynamic: '\[' is no regular expression"),
    ({"group_size": 16}, r"qzeros is \[2, 8\], it must be \[4, 8\]"),
    ({"desc_act": 3}, r"desc_act: 3 is not supported"),
])  # fmt: skip
def test_what_a_gptq_config_may_not_say(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    written(tmp_path, "gptq")
    edit(tmp_path / "quantized", **values)
    with pytest.raises(CheckpointError, match=message):
        zoo.load(tmp_path / "quantized")


@pytest.mark.parametrize(("values", "message"), [
    ({"version": "gemv"}, r"version: 'gemv' is not supported; supported: gemm"),
    ({"bits": 3}, r"bits: 3 is not supported"),
    ({"zero_point": False}, r"zero_point: only true"),
    ({"modules_to_not_convert": [3]}, r"modules_to_not_convert\.0 must be a string"),
])  # fmt: skip
def test_what_an_awq_config_may_not_say(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    written(tmp_path, "awq", symmetric=False)
    edit(tmp_path / "quantized", **values)
    with pytest.raises(CheckpointError, match=message):
        zoo.load(tmp_path / "quantized")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    written(tmp_path, "gptq")
    file = tmp_path / "quantized/model.safetensors"
    tensors = load_file(file)
    up = "model.layers.1.mlp.up_proj"
    index = tensors[f"{up}.g_idx"]
    for name, tensor, message in (
        ("g_idx", index.flip(0), r"layers\.1\.mlp\.up_proj: g_idx puts inputs into groups of their own, but .*desc_act is false"),
        ("g_idx", index.long(), r"g_idx is int64, it must be int32"),
        ("qzeros", tensors[f"{up}.qzeros"] + 3, r"sym is true, but the zero points in qzeros differ"),
        ("scales", tensors[f"{up}.scales"][:1], r"scales is \[1, 96\], it must be \[2, 96\]"),
    ):
        save_file(tensors | {f"{up}.{name}": tensor.contiguous()}, file)
        with pytest.raises(CheckpointError, match=message):
            zoo.load(tmp_path / "quantized")
    save_file({n: t for n, t in tensors.items() if n != f"{up}.qzeros"}, file)
    for choice in ("keep", "dequantize"):
        with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.qzeros"):
            zoo.load(tmp_path / "quantized", quantized=choice)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quantized='plain' is no choice"):
        zoo.load(tmp_path / "quantized", quantized="plain")  # type: ignore[arg-type]


def test_what_a_format_cannot_hold_is_said_before_anything_is_written(tmp_path: Path) -> None:
    model = written(tmp_path, "compressed_tensors", bits=3)
    with pytest.raises(ValueError, match="awq holds 4 bits, not 3"):
        zoo.save(model, tmp_path / "awq", format="awq")
    storage = PackedInt(group_size=32, symmetric=False, scale_dtype="float16")
    held = weights(storage)
    held["zero"] = torch.zeros_like(held["zero"])
    with pytest.raises(ValueError, match="a zero point is 0, which version 1 of gptq cannot hold"):
        V1.encode(storage, held, 64, 32)
    with pytest.raises(ValueError, match="12 outputs do not fill words of eight"):
        AWQ.encode(storage, weights(storage, 64, 12), 64, 12)
    assert not (tmp_path / "awq").exists()


def test_scattered_groups_are_kept_by_gptq_alone() -> None:
    storage = PackedInt(group_size=32, scattered=True)
    assert AWQ.accepts(storage) == ["awq holds groups of neighbouring inputs"]
    assert list(PackedInt(scattered=True).problems(64, 32, False)) == [
        ("scattered", "there is one group, so no input can be in another; give a group_size")
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        V2.decode(storage, V2.encode(storage, weights(storage), 64, 32), 64, 32)
