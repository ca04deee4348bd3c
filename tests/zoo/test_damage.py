"""Checkpoints whose weights or settings are damaged: said once, with the file, the reason and the way out."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from tests.eval.made import make_tiny
from tests.quantize.models import small
from zoo.checkpoint import CheckpointError, NoTokenizer
from zoo.generation import eos_ids
from zoo.loading import not_finite
from zoo.quantize import quantize
from zoo.tokenizers import from_folder, from_gguf
from zoo.weights import materialize


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def damage(folder: Path, **values: float) -> None:
    """Set one element of a tensor to a value."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in values.items():
        tensors[name.replace("__", ".")].view(-1)[3] = value
    save_file(tensors, folder / "model.safetensors")


# ---- weights


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_named(folder: Path, value: float) -> None:
    damage(folder, model__norm__weight=value, model__layers__1__mlp__up_proj__weight=value)
    with pytest.warns(
        UserWarning, match=r"model: 2 tensors hold NaN or infinite values: .*model\.layers\.1\.mlp\.up_proj\.weight \(1\)"
    ) as e:
        zoo.load(folder)
    assert "model.norm.weight (1)" in str(e[0].message)
    assert e[0].filename == __file__


def test_not_more_than_eight_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor * math.nan for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.warns(UserWarning, match=rf"{len(tensors)} tensors .* and {len(tensors) - 8} more\."):
        zoo.load(folder)


def test_values_too_large_for_a_dtype_are_named(folder: Path) -> None:
    damage(folder, model__norm__weight=1e6)
    with pytest.warns(UserWarning, match=r"model\.norm\.weight \(1\).*too large for float16, then load with dtype='float32'"):
        zoo.load(folder, dtype="float16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.load(folder)


def test_parts_loaded_later_are_looked_at_then(folder: Path) -> None:
    damage(folder, model__layers__1__mlp__up_proj__weight=math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = zoo.load(folder, lazy=True)
        materialize(model, "layers.0")
    with pytest.warns(UserWarning, match=r"1 tensors hold NaN .*model\.layers\.1\.mlp\.up_proj\.weight \(1\)"):
        materialize(model, "layers.1")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_is_not_finite_is_counted(dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    assert not_finite(values.to(dtype)) == 0
    values[0, 1] = math.nan
    assert not_finite(values.to(dtype)) == 1
    assert not_finite(torch.full((70_000,), 3.0).to(dtype)) == 0  # a sum beyond the largest float16
    assert not_finite(torch.ones(3, dtype=torch.int32)) == 0


# ---- JSON beside the weights

NO_OBJECT = {
    "list": b"[1]",
    "number": b"5",
    "text": b'"x"',
    "cut short": b'{"a": ',
    "no text": b'\xff\xfe{"a"',
    "empty": b"",
    "deep": b"[" * 99_999,
}
FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]


@pytest.mark.parametrize("content", NO_OBJECT.values(), ids=NO_OBJECT.keys())
@pytest.mark.parametrize("file", FILES)
def test_a_tokenizer_s_file_that_is_no_object_is_named(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model: {file} (is not JSON|must hold a JSON object).*download it again"):
        _ = zoo.load(folder).tokenizer


@pytest.mark.parametrize("content", NO_OBJECT.values(), ids=NO_OBJECT.keys())
def test_generation_settings_that_are_no_object_are_named_before_weights_are_read(folder: Path, content: bytes) -> None:
    (folder / "generation_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model: generation_config\.json (is not JSON|must hold a JSON object)"):
        zoo.load(folder, lazy=True)


@pytest.mark.parametrize(
    ("file", "field", "value", "named"),
    [
        ("tokenizer.json", "model", [1], "tokenizer.json"),
        ("tokenizer.json", "added_tokens", 5, "tokenizer.json"),
        ("tokenizer.json", "version", None, "tokenizer.json"),
        ("tokenizer_config.json", "bos_token", 5, "tokenizer_config.json"),
        ("tokenizer_config.json", "added_tokens_decoder", {"a": 1}, "tokenizer_config.json"),
        ("tokenizer_config.json", "model_max_length", "long", "tokenizer_config.json"),
        ("tokenizer_config.json", "padding_side", [1], "tokenizer_config.json"),
    ],
)
def test_a_tokenizer_s_field_of_the_wrong_kind(folder: Path, file: str, field: str, value: Any, named: str) -> None:
    data = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(data | {field: value}))
    with pytest.raises(CheckpointError, match=rf"model: {named}\b.* cannot be read as a tokenizer \(\w+: .*download it again"):
        from_folder(folder)


@pytest.mark.parametrize("template", [5, {"a": 1}, True])
def test_a_chat_template_that_is_no_text(folder: Path, template: Any) -> None:
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    if isinstance(template, dict):  # several templates by name
        assert from_folder(folder).chat_template == template
        return
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json.*chat_template is a"):
        from_folder(folder)


def test_a_chat_template_that_cannot_be_run_is_one_error(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in %}")
    with pytest.raises(ValueError, match=r"chat template refuses the conversation: TemplateSyntaxError"):
        zoo.load(folder).generate("hi", chat=True)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 5},
        {"tokens": [1, 2, 3]},
        {"token_type": [1]},
        {"merges": [""]},
        {"merges": ["x y"]},
        {"eos_token_id": "2"},
        {"merges": 3},
    ],
    ids=str,
)
def test_gguf_metadata_of_the_wrong_kind(change: dict[str, Any]) -> None:
    good = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "c"], "token_type": [1, 1, 3], "merges": [], "eos_token_id": 2}
    assert from_gguf({f"tokenizer.ggml.{k}": v for k, v in good.items()}).encode("ab") == [0, 1]
    with pytest.raises(CheckpointError, match=r"tokenizer\.\* cannot be understood \(\w+: .*convert the model anew"):
        from_gguf({f"tokenizer.ggml.{k}": v for k, v in (good | change).items()})


def test_gguf_metadata_without_a_tokenizer() -> None:
    with pytest.raises(NoTokenizer, match=r"no tokenizer.*pass token ids"):
        from_gguf({"general.architecture": "llama"})


@pytest.mark.parametrize("named", ["</s>", [1, "</s>"], 2.0, {"a": 1}, True, -1, [[2]]], ids=str)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_ends_of_the_wrong_kind_name_the_file(file: str, named: Any) -> None:
    settings = {"eos_token_id": named}
    here = {"generation_config.json": settings} if file == "generation_config.json" else {}
    model: Any = SimpleNamespace(config=settings, source=SimpleNamespace(generation=here.get("generation_config.json", {})))
    with pytest.raises(ValueError, match=rf"^{file}: eos_token_id must be a token id or a list of them"):
        eos_ids(model)


@pytest.mark.parametrize("named", ["float12", "int8", "load", 5, ["float32"], {"a": 1}], ids=str)
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_a_dtype_that_is_none(folder: Path, field: str, named: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    plain = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}
    for word, expected in (("torch.bfloat16", torch.bfloat16), ("float16", torch.float16), ("auto", torch.float32), (None, torch.float32)):
        (folder / "config.json").write_text(json.dumps(plain | {field: word}))
        assert zoo.load(folder, lazy=True).source.dtype == expected
    (folder / "config.json").write_text(json.dumps(plain | {field: named}))
    with pytest.raises(CheckpointError, match=r"model: config\.json: dtype .* is no kind of floating-point number; write float32"):
        zoo.load(folder)


# ---- quantization_config


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    model = small(tied=False)
    quantize(model, "rtn", group_size=32, progress=False)
    zoo.save(model, folder / "model")
    return folder / "model"


def refused(source: Path, folder: Path, edit: Callable[[dict[str, Any]], None]) -> str:
    """What loading says of a quantized checkpoint whose config was edited."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as e:
        zoo.load(folder)
    assert f"{folder}: " in str(e.value)
    return str(e.value)


@pytest.mark.parametrize(
    "value", [[], [1], "x", "", 0, 5, False, True, {}, {"quant_method": None}, {"quant_method": ["x"]}, {"quant_method": "x"}], ids=repr
)
def test_a_quantization_config_of_the_wrong_kind(quantized: Path, tmp_path: Path, value: Any) -> None:
    found = refused(quantized, tmp_path / "q", lambda config: config.update(quantization_config=value))
    assert "quantization_config" in found
    assert "supported quant_method: " in found
    assert "compressed-tensors" in found


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("config_groups",), [1], "config_groups must be an object, it is a list ([1])"),
        (("config_groups",), {}, "config_groups is missing or empty"),
        (("config_groups",), "x", "config_groups must be an object, it is a str ('x')"),
        (("ignore",), "lm_head", "ignore must be a list, it is a str ('lm_head')"),
        (("ignore",), [1], "ignore.0 must be a string, it is a int (1)"),
        (("ignore",), ["re:["], "ignore: '[' is no regular expression"),
        ((*GROUP, "targets"), "Linear", "config_groups.group_0.targets must be a list, it is a str ('Linear')"),
        ((*GROUP, "targets"), ["re:("], "config_groups: '(' is no regular expression"),
        ((*GROUP, "format"), 5, "config_groups.group_0.format: 5 is not supported; supported: pack-quantized"),
        ((*GROUP, "weights"), [4], "config_groups.group_0.weights must be an object, it is a list ([4])"),
        ((*GROUP, "weights"), {}, "config_groups.group_0.weights.num_bits is missing; supported: 2, 3, 4, 5, 6, 7, 8"),
        ((*GROUP, "weights", "num_bits"), None, "weights.num_bits is missing; supported: 2, 3"),
        ((*GROUP, "weights", "num_bits"), "4", "weights.num_bits: '4' is not supported; supported: 2, 3"),
        ((*GROUP, "weights", "num_bits"), 16, "weights.num_bits: 16 is not supported; supported: 2, 3"),
        ((*GROUP, "weights", "num_bits"), [4], "weights.num_bits: [4] is not supported; supported: 2, 3"),
        ((*GROUP, "weights", "symmetric"), "yes", "weights.symmetric: 'yes' is not supported; supported: True, False"),
        ((*GROUP, "weights", "dynamic"), 0, "weights.dynamic: 0 is not supported; supported: False"),
        ((*GROUP, "weights", "group_size"), True, "weights.group_size: a positive number is needed, got True"),
        ((*GROUP, "weights", "group_size"), [32], "weights.group_size: a positive number is needed, got [32]"),
        ((*GROUP, "weights", "group_size"), 5, "does not fit model.layers.0.self_attn.q_proj: group_size: 64 inputs do not divide"),
        ((*GROUP, "output_activations"), {"num_bits": 8}, "output_activations: quantized activations are not supported"),
    ],
)  # fmt: skip
def test_a_quantization_field_of_the_wrong_kind(quantized: Path, tmp_path: Path, path: tuple[str, ...], value: Any, message: str) -> None:
    def edit(config: dict[str, Any]) -> None:
        node = config["quantization_config"]
        for name in path[:-1]:
            node = node[name]
        node[path[-1]] = value

    found = refused(quantized, tmp_path / "q", edit)
    assert "quantization_config" in found
    assert message in found


@pytest.mark.parametrize(
    ("leaf", "change", "message"),
    [
        ("weight_shape", lambda t: t + 1, "weight_shape says"),
        ("weight_packed", lambda t: t[:, :1], "weight_packed is [64, 1], a weight of [64, 64] has [64, 8]"),
        ("weight_packed", lambda t: t.to(torch.int64), "weight_packed is int64, it must be int32"),
        ("weight_scale", lambda t: t[:, :1], "weight_scale is [64, 1], a weight of [64, 64] has [64, 2]"),
    ],
)
def test_packed_tensors_that_do_not_fit_name_their_module(quantized: Path, tmp_path: Path, leaf: str, change: Any, message: str) -> None:
    folder = Path(shutil.copytree(quantized, tmp_path / "q"))
    tensors = load_file(folder / "model.safetensors")
    module = "model.layers.0.self_attn.q_proj"
    save_file(tensors | {f"{module}.{leaf}": change(tensors[f"{module}.{leaf}"]).contiguous()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as e:
        zoo.load(folder)
    assert f"{folder}: {module}: {message}" in str(e.value)
