"""Files of strangers: small ones that would cost a long time, and settings that no model can have, are refused with their place."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from tests.quantize.models import small
from tests.zoo.oracle import llama_checkpoint
from tests.zoo.test_classify import SETTINGS, vit
from tests.zoo.test_images import picture
from zoo.checkpoint import CheckpointError
from zoo.classify import classify
from zoo.components.repeats import MOST
from zoo.components.spec import SpecError, dump, load
from zoo.layouts import split, split_evenly, viewed
from zoo.model import ModelSpec
from zoo.quantize.formats.compressed_tensors._matching import match
from zoo.weights import Entry, changed, folded

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "vocab_size": 50, "max_position_embeddings": 24}  # fmt: skip
HUGE = {**LLAMA, "num_hidden_layers": 10**9}
SMALL: dict[str, Any] = dump(small().spec)
NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama_checkpoint(tmp_path / "model")
    return tmp_path / "model"


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def made(folder: Path, config: dict[str, Any], count: int = 300, size: int = 0) -> Path:
    """A checkpoint of that many tensors of so many values, none of them the model's."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"t{i}": torch.ones(size) for i in range(count)}, folder / "model.safetensors")
    return folder


# ---- shapes


def test_a_fused_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    vit(tmp_path / "vit", SETTINGS)
    path = tmp_path / "vit" / "model.safetensors"
    tensors, name = load_file(path), "vit.embeddings.patch_embeddings.projection.weight"
    save_file(tensors | {name: tensors[name].transpose(0, 3).contiguous()}, path)
    with pytest.raises(CheckpointError, match=r"vit: vit\.embeddings\.patch_emb.*weight: .*\[4, 3, 4, 32\].*\[32, 3, 4, 4\]"):
        zoo.load(tmp_path / "vit")


@pytest.mark.parametrize(("op", "shape", "reason"), [
    (split([4, 2, 2]), (7, 3), r"\[7, 3\].*split_sizes|\[7, 3\].*sum"),
    (split([4, 2, 2], dim=1), (8,), r"\[8\].*[Dd]imension"),
    (split_evenly(3), (2, 3), r"\[2, 3\] hold 2 tensors of the model, it has 3"),
    (viewed((1, -1, 4), (-1, 4)), (4, 1, 4), r"\[4, 1, 4\].*\[1, -1, 4\]"),
])  # fmt: skip
def test_what_an_operation_cannot_read(op: Any, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"somewhere: fused: .*{reason}"):
        changed(Entry(("fused",), ("a", "b", "c"), op), [torch.ones(shape)], "somewhere: fused")


def test_names_are_folded() -> None:
    names = [f"layers.{l}.experts.{e}.w{i}" for l in range(3) for e in (0, 1, 2, 5) for i in (1, 2)]
    assert folded(names) == "layers.{0..2}.experts.{0..2,5}.w{1,2}"
    assert folded([*names, "layers.7.norm", "head"]) == "layers.{0..2}.experts.{0..2,5}.w{1,2}, layers.7.norm, head"
    assert folded(["a.0.b.0", "a.0.b.1", "a.1.b.1"]) in ("a.0.b.0, a.{0,1}.b.1", "a.0.b.{0,1}, a.1.b.1")
    assert folded(["x.007", "x.7", "x." + "9" * 5000]).startswith("x.007, x.7, x.999")
    assert folded([]) == ""


# ---- small files that cost a long time


@pytest.mark.parametrize(("config", "reason"), [
    ({"model_type": "gemma3", "text_config": HUGE}, r"text_config\.num_hidden_layers is 1000000000"),
    ({"model_type": "llama4", "text_config": HUGE}, r"text_config\.num_hidden_layers is 1000000000"),
    ({**LLAMA, "model_type": "qwen2_vl", "text_config": HUGE}, r"text_config\.num_hidden_layers is 1000000000"),
    ({"model_type": "clip", "vision_config": {"num_hidden_layers": 10**9}}, r"vision_config\.num_hidden_layers is 1000000000"),
    ({**LLAMA, "num_hidden_layers": 301}, r"num_hidden_layers is 301, it must lie in 1\.\.300; the files have 300 tensors"),
    ({**LLAMA, "model_type": "mixtral", "num_hidden_layers": 4, "num_local_experts": 10_000, "num_experts_per_tok": 2},
     r"40,000 experts of width 32 are more than the files can hold, which have 300 values"),
    ({"model_type": "zoo", "zoo_spec": {"layers": [{"repeat": 10**8}]}}, r"zoo_spec\.layers\.0\.repeat: must be a whole number"),
])  # fmt: skip
def test_more_than_the_files_can_hold(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    folder, start = made(tmp_path / "model", config, size=1), time.perf_counter()
    with pytest.raises(CheckpointError, match=f"model: .*{reason}"):
        zoo.load(folder)
    assert time.perf_counter() - start < 3


def test_tensors_without_values_are_no_layers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 100, .* each layer needs one that holds values"):
        zoo.load(made(tmp_path / "model", {**LLAMA, "num_hidden_layers": 100}))


def test_missing_layers_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.\{0\.\.99\}\.input_layernorm.*300 unexpected: model\.t\{0\.\.299\}") as e:
        zoo.load(made(tmp_path / "model", {**LLAMA, "num_hidden_layers": 100}, size=1))
    assert len(str(e.value)) < 800


@pytest.mark.parametrize("repeat", [0, -1, 10**9, 1.5, "2", None, True])
def test_repeats_are_counts(repeat: object) -> None:
    layer = SMALL["layers"]
    with pytest.raises(SpecError, match=rf"layers\.0\.repeat: must be a whole number in 1\.\.{MOST}"):
        load(ModelSpec, {**SMALL, "layers": [{"repeat": repeat, "of": layer}]})


def test_repeats_inside_repeats_are_counted_together() -> None:
    nested = [{"repeat": 50_000, "of": [{"repeat": 50_000, "of": [{}]}]}]
    with pytest.raises(SpecError, match=f"layers: holds more than {MOST} entries"):
        load(ModelSpec, {**SMALL, "layers": nested})


@pytest.mark.parametrize("pattern", ["(([a-z0-9._]+)+)+#", "((.{1,1000}){1,1000}){1,1000}#"])  # Python's own engine hangs at both
def test_expressions_that_hang_others_are_matched_at_once(pattern: str) -> None:
    start = time.perf_counter()
    assert match("model.layers.0.self_attn.q_proj", [f"re:{pattern}"], "ignore") is None
    assert time.perf_counter() - start < 5


def test_expressions_have_a_limit() -> None:
    slow = "(a|a)*b|(([a-z._0-9]|[a-z._0-9])*)*#"
    with pytest.raises(ValueError, match=r"ignore: an expression .* takes more than .* seconds to match model.layers.0"):
        match("model.layers.0.self_attn.q_proj.weight.and.so.on", [f"re:{slow}"], "ignore")


# ---- what reading may meet


@pytest.mark.parametrize(("changes", "reason"), [
    ({"model_type": "smollm3", "no_rope_layers": [1]}, r"no_rope_layers must be a list of an entry for each of 2 layers, it is \[1\]"),
    ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types must be a list of an entry for each of 2 layers"),
    ({"model_type": "zoo", "zoo_spec": {**SMALL, "checkpoint": "zoo"}}, "zoo_spec.checkpoint: 'zoo' is no family"),
    ({"model_type": "zoo", "zoo_spec": {**SMALL, "checkpoint": "lama"}}, "zoo_spec.checkpoint: 'lama' .*did you mean 'llama'"),
    ({"model_type": "mixtral"}, "config.json has no num_local_experts"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is the text 'false'; write false without quotes"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is the text 'no'; write false without quotes"),
    ({"attention_bias": "1"}, "attention_bias is the text '1'; write true or 1 without quotes"),
    ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' .* write float32, bfloat16, float16, float64"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": NAN}}, r"position\.theta: .* finite number, got nan"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": INFINITE}}, r"position\.theta: .* finite number, got inf"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, r"position\.theta: must be a positive number, got 0"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, r"position\.scaling\.factor: must be a positive number, got 0"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": -1.0}}, r"position\.scaling\.factor: must be a positive number, got -1"),
    ({"rms_norm_eps": -1}, r"mixer_norm\.eps: must be a finite number that is not negative, got -1"),
    ({"rms_norm_eps": INFINITE}, r"norm\.eps: .* finite number, got inf"),
    ({"max_position_embeddings": 0}, r"context: must be at least 1, got 0"),
    ({"max_position_embeddings": -1}, r"context: must be at least 1, got -1"),
])  # fmt: skip
def test_settings_that_no_model_can_have(folder: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"model: .*{reason}"):
        zoo.load(edited(folder, **changes))


def test_overrides_name_the_checkpoint(folder: Path) -> None:
    for edit in ("norm.eps=-1", "norm.eps=.nan", "norm.epz=1"):
        with pytest.raises(SpecError, match=r"model: .*norm\.ep"):
            zoo.load(folder, override=[edit])


@pytest.mark.parametrize("reference", ["x" * 5000, "a/" * 3000, "a\0b", "package:json/" + "x" * 5000, "a#" + "x" * 5000])
def test_paths_that_cannot_be(reference: str) -> None:
    with pytest.raises(CheckpointError) as e:
        zoo.load(reference)
    assert len(str(e.value)) < 300


def test_shards_of_long_names(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(CheckpointError, match=r"model: model\.safetensors\.index\.json: 'xxx.*255"):
        zoo.load(folder)


@pytest.mark.parametrize("kind", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED])
def test_damaged_archives(tmp_path: Path, kind: int) -> None:
    path, text = tmp_path / "m.zip", json.dumps({str(i): i for i in range(2000)})
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("config.json", text)
    data = bytearray(path.read_bytes())
    data[80:180] = b"\xff" * 100
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"m\.zip is damaged or no zip archive"):
        zoo.load(path)


def test_archives_with_long_names(tmp_path: Path) -> None:
    path = tmp_path / "m.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("x" * 300 + ".safetensors", "")
    with pytest.raises(CheckpointError, match=r"m\.zip: the archive holds a name of 312 characters \(xxx"):
        zoo.load(path)


# ---- images


@pytest.mark.parametrize("labels", [["a", "b", "c"], {"x": "a"}, {"0": "a", "1.5": "b"}, 5])
def test_labels_must_be_an_object(tmp_path: Path, labels: object) -> None:
    vit(tmp_path / "vit", SETTINGS)
    picture(8, 8).save(tmp_path / "a.png")
    model = zoo.load(tmp_path / "vit")
    model.config = model.config | {"id2label": labels}
    with pytest.raises(ValueError, match=r"vit: .*id2label must be an object of numbers and names"):
        classify(model, [tmp_path / "a.png"])


def test_images_that_cannot_be_prepared_are_named(tmp_path: Path) -> None:
    from PIL import Image

    vit(tmp_path / "vit", {**SETTINGS, "image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 4000}})
    model = zoo.load(tmp_path / "vit")
    Image.new("I;16", (4, 4)).save(tmp_path / "deep.png")
    Image.new("L", (2, 4000)).save(tmp_path / "long.png")
    for name, reason in (("deep.png", "mode I;16"), ("long.png", "4000 x 2")):
        with pytest.raises(ValueError, match=rf"{name}: .*{reason}"):
            classify(model, [tmp_path / name])
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, "do_resize": "false"}))
    with pytest.raises(ValueError, match="do_resize must be true or false, it is 'false'"):
        classify(zoo.load(tmp_path / "vit"), [tmp_path / "deep.png"])
    with pytest.raises(ValueError, match="no such image"):
        classify(model, ["x" * 5000])
