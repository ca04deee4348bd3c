"""The formats aqlm and native: saved models, what transformers reads, and configs that are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.quantize.models import MOE, ids, same_bits, small
from tests.zoo.oracle import llama_checkpoint, relative_error
from zoo.components.contracts import Linear
from zoo.components.linear.additive import Additive
from zoo.components.linear.dense import Dense
from zoo.components.linear.e8p import E8P
from zoo.components.linear.packed_int import PackedInt
from zoo.components.linear.rotated import Rotated
from zoo.components.spec import SpecError, TensorInfo
from zoo.formats import Format
from zoo.loading import load
from zoo.quantize import quantize, verify
from zoo.quantize.formats.aqlm import AQLMFormat
from zoo.quantize.formats.native import Native
from zoo.storages import format_for

NAME = "model.layers.0.mlp.down_proj"
AQLM: dict[str, Any] = {"method": "aqlm", "bits": 6, "rounds": 1, "steps": 5}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 64, "attention_bias": True}


def saved(folder: Path, format: str, rules: list[str], **settings: Any) -> zoo.Model:
    llama_checkpoint(folder / "model", **SIZES)
    model = zoo.load(folder / "model")
    quantize(model, progress=False, rules=rules, calibration=ids(), **settings)
    zoo.save(model, folder / "quantized", format=format)
    return model


@pytest.mark.parametrize(
    ("settings", "format", "rules"),
    [
        ({"method": "quip_sharp", "bits": 2, "sweeps": 1}, "native", []),
        (
            {"method": "quip_sharp", "bits": 3, "sweeps": 0},
            "native",
            ["layers.0.*={bits: 4}", "layers.1.*.k=keep", "layers.1.*.o={name: quip}"],
        ),
        ({"method": "quip", "bits": 4, "sweeps": 1}, "native", ["*.mlp.down={name: gptq, bits: 4, group_size: 32}"]),
        (AQLM, "native", ["layers.0.*={bits: 4}"]),
        (AQLM, "aqlm", ["layers.1.*.k=keep"]),
    ],
    ids=str,
)
def test_a_saved_model_is_the_one_in_memory(settings: dict[str, Any], format: str, rules: list[str], tmp_path: Path) -> None:
    model = saved(tmp_path, format, rules, **settings)
    assert verify(model, tmp_path / "quantized").logit_difference == 0
    again = load(tmp_path / "quantized")
    assert again.spec == model.spec
    assert same_bits(again, model)
    cast = load(tmp_path / "quantized", dtype="bfloat16")
    held = {n: t for n, t in cast.state_dict().items() if n.endswith(("codes", "scale", "scales", "signs", "codebooks"))}
    assert held
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in held.items())


@pytest.mark.parametrize("rules", [[], ["layers.1.*.k=keep", "layers.0.mlp.*=keep"]], ids=str)
def test_transformers_reads_aqlm(rules: list[str], tmp_path: Path) -> None:
    pytest.importorskip("aqlm", reason="needs the package aqlm (pip install --no-deps aqlm)")
    from transformers import AutoModelForCausalLM

    model = saved(tmp_path, "aqlm", rules, **AQLM)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.float32)
    assert type(theirs.model.layers[0].self_attn.q_proj).__name__ == "QuantizedLinear"
    x = ids(2, 24)
    with torch.no_grad():
        assert relative_error(model(x), theirs(x).logits) < 1e-5


def test_a_model_of_the_library_is_read(tmp_path: Path) -> None:
    """Modules of aqlm with random codes, saved under its names with transformers' config."""
    inference = pytest.importorskip("aqlm.inference", reason="needs the package aqlm (pip install --no-deps aqlm)")
    from safetensors.torch import save_file

    theirs = llama_checkpoint(tmp_path / "plain", **SIZES)
    generator = torch.Generator().manual_seed(0)
    for name, module in list(theirs.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            new = inference.QuantizedLinear(module.in_features, module.out_features, 8, 1, 1, 10, module.bias is not None)
            new.codes.data = torch.randint(-512, 512, new.codes.shape, generator=generator).to(torch.int16)
            new.codebooks.data = torch.randn(new.codebooks.shape, generator=generator) / 8
            new.scales.data = torch.rand(new.scales.shape, generator=generator) + 0.5
            if module.bias is not None:
                new.bias.data = module.bias.data
            theirs.set_submodule(name, new)
    folder = tmp_path / "theirs"
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in theirs.state_dict().items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "plain/config.json").read_text())
    quantization = {"quant_method": "aqlm", "nbits_per_codebook": 10, "num_codebooks": 1, "in_group_size": 8, "out_group_size": 1,
                    "linear_weights_not_to_quantize": ["model.embed_tokens.weight", "lm_head.weight"]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    ours = load(folder, dtype="float32")
    assert ours.layers[1].mlp.down.spec == Additive(codebooks=1, bits=10, scale_dtype="float32")
    x = ids(2, 24)
    with torch.no_grad():
        assert relative_error(ours(x), theirs(x).logits) < 1e-5


def test_what_is_saved_says_who_reads_it(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "model", **SIZES)
    model = zoo.load(tmp_path / "model")
    quantize(model, "quip_sharp", progress=False, sweeps=0, calibration=ids())
    result = zoo.save(model, tmp_path / "native", format="native")
    assert result.transformers == "it knows no quant_method modular-zoo"
    with pytest.raises(ValueError, match=r"compressed_tensors cannot hold this model: .*rotated"):
        zoo.save(model, tmp_path / "other", format="compressed_tensors")
    with pytest.raises(ValueError, match="aqlm holds additive, not rotated"):
        zoo.save(model, tmp_path / "other", format="aqlm")
    assert not (tmp_path / "other").exists()


def test_a_model_of_several_kinds_is_quantized_and_copied() -> None:
    model = small()
    quantize(model, "quip_sharp", progress=False, bits=2, calibration=ids(), rules=["layers.0.*={name: aqlm, bits: 4, rounds: 1}"])
    assert model.layers[0].mlp.up.spec.name == "additive"
    assert model.layers[1].mlp.up.spec == Rotated(inner=E8P())
    assert same_bits(copy.deepcopy(model), model)
    assert model(ids()).isfinite().all()


def test_a_run_is_taken_up_to_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": "quip_sharp", "sweeps": 1, "progress": False, "calibration": ids()}
    whole, again = small(), small()
    quantize(whole, **settings, work_dir=tmp_path)
    quantize(again, **settings, work_dir=tmp_path)
    assert same_bits(whole, again)


@pytest.mark.parametrize("settings", [{"method": "quip_sharp", "sweeps": 0}, AQLM], ids=str)
def test_experts_are_quantized(settings: dict[str, Any], tmp_path: Path) -> None:
    model = small(MOE, layers=1)
    quantize(model, progress=False, calibration=ids(), **settings)
    assert model(ids()).isfinite().all()
    zoo.save(model, tmp_path / "saved", format="native")
    assert verify(model, tmp_path / "saved").logit_difference == 0


# ---- configs -----------------------------------------------------------------------------------------------------------------


def config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "aqlm", "nbits_per_codebook": 16, "num_codebooks": 1, "in_group_size": 8, "out_group_size": 1,
            "linear_weights_not_to_quantize": ["model.layers.1.mlp.up_proj.weight", "lm_head"]} | changes  # fmt: skip


def test_aqlm_configs_are_read() -> None:
    format = AQLMFormat()
    assert format_for(config()) == format
    assert format.storage(config(), NAME, {}) == Additive(codebooks=1, bits=16)
    assert format.storage({"quant_method": "aqlm"}, NAME, {}) == Additive(codebooks=1, bits=16)  # the library's defaults
    assert format.storage(config(), "lm_head", {}) is None
    assert format.storage(config(), "model.layers.1.mlp.up_proj", {}) is None
    assert format.storage(config(), NAME, {"weight": TensorInfo((4, 4))}) is None
    wide = format.storage(
        config(num_codebooks=2, nbits_per_codebook=8), NAME, {"codes": TensorInfo((1,)), "codebooks": TensorInfo((1,), "float32")}
    )
    assert wide == Additive(codebooks=2, bits=8, scale_dtype="float32")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_codebooks": "two"}, "quantization_config.num_codebooks must be a positive number, it is 'two'"),
        ({"in_group_size": 0}, "in_group_size must be a positive number, it is 0"),
        ({"linear_weights_not_to_quantize": [3]}, r"linear_weights_not_to_quantize\.0 must be a string"),
    ],
)
def test_aqlm_configs_that_cannot_be_held(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AQLMFormat().storage(config(**change), NAME, {})


def test_several_kinds_need_the_native_format() -> None:
    storages: dict[str, Linear] = {"a": Additive(), "b": Additive(bits=4), "lm_head": Dense()}
    with pytest.raises(ValueError, match="use the format native"):
        AQLMFormat().config(storages)
    kept = AQLMFormat().config({"a": Additive(), "lm_head": Dense()})
    assert kept["linear_weights_not_to_quantize"] == ["lm_head", "lm_head.weight"]


def test_native_configs_name_what_differs() -> None:
    storages: dict[str, Linear] = {f"m.{i}": Rotated(inner=E8P(bits=3)) for i in range(3)}
    storages |= {"m.3": PackedInt(bits=8), "lm_head": Dense()}
    written = json.loads(json.dumps(Native().config(storages)))
    assert written["linear"] == {"name": "rotated", "inner": {"name": "e8p", "bits": 3}}
    assert written["others"] == {"m.3": {"name": "packed_int", "bits": 8}, "lm_head": "dense"}
    assert format_for(written) == Native()
    for name, storage in storages.items():
        assert Native().storage(written, name, {}) == (None if storage.name == "dense" else storage)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"version": 2}, ValueError, "quantization_config.version: 2 is not supported; supported: 1"),
        ({"linear": {"name": "e9p"}}, SpecError, "quantization_config.linear: no linear named 'e9p'; did you mean 'e8p'"),
        ({"others": {NAME: {"name": "e8p", "bits": 7}}}, SpecError, rf"quantization_config.others.{NAME}\.bits"),
        ({"others": 3}, ValueError, "quantization_config.others must be an object"),
    ],
)
def test_native_configs_that_cannot_be_held(change: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        Native().storage({"quant_method": "modular-zoo", "version": 1, "linear": "e8p"} | change, NAME, {})


@pytest.mark.parametrize(("format", "storage"), [(Native(), Rotated(inner=E8P())), (AQLMFormat(), Additive(bits=4))], ids=str)
def test_tensors_that_do_not_fit_are_named(format: Format, storage: Linear) -> None:
    infos = storage.tensors(16, 8, False)
    tensors = {n: torch.zeros(i.shape, dtype=getattr(torch, i.dtype or "float32")) for n, i in infos.items()}
    assert format.disk_names(storage, False) == list(tensors)
    assert format.decode(storage, tensors, 16, 8).keys() == tensors.keys()
    codes = next(n for n in tensors if n.endswith("codes"))
    with pytest.raises(ValueError, match=rf"{codes} is \[3, 3\], a weight of \[8, 16\] has "):
        format.decode(storage, tensors | {codes: torch.zeros(3, 3)}, 16, 8)
    with pytest.raises(ValueError, match=f"{codes} is float32, it must be "):
        format.decode(storage, tensors | {codes: tensors[codes].float()}, 16, 8)
