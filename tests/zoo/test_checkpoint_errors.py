"""Bad checkpoints give one clear error that names the place, before anything is loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from tests.zoo.oracle import llama_checkpoint
from zoo import loading
from zoo.checkpoint import CheckpointError, open_checkpoint
from zoo.gguf_file import read_header
from zoo.weights import materialize


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama_checkpoint(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add, or (None) remove tensors."""
    path = folder / "model.safetensors"
    tensors = {k.replace(".", "__"): v for k, v in load_file(path).items()} | changes
    save_file({k.replace("__", "."): v for k, v in tensors.items() if v is not None}, path)


def shard(folder: Path) -> list[Path]:
    """Save the checkpoint again in several shards."""
    model = zoo.build(zoo.spec(folder))
    zoo.save(model, folder.parent / "sharded", shard_bytes=8_000)
    return sorted((folder.parent / "sharded").glob("*.safetensors"))


def test_nothing_there() -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: nothing is there.*folder.*\.gguf.*package:NAME/FILE.*hub id"):
        zoo.load("./nowhere")


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        zoo.load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_config_is_not_an_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        zoo.load(folder)


def test_unknown_architecture_lists_the_known_ones(folder: Path) -> None:
    edit_config(folder, model_type="lama")
    with pytest.raises(ValueError, match=r"'lama' is not known; known: .*llama"):
        zoo.load(folder)


@pytest.mark.parametrize(("field", "value", "message"), [
    ("hidden_act", "swigloo", "hidden_act 'swigloo'"),
    ("rope_parameters", {"rope_type": "spiral"}, "rope type 'spiral'"),
    ("num_key_value_heads", 3, r"layers\.0\.mixer\.projection\.kv_heads: heads \(4\) must be a multiple of kv_heads \(3\)"),
])  # fmt: skip
def test_config_values_that_cannot_be(folder: Path, field: str, value: object, message: str) -> None:
    edit_config(folder, **{field: value})
    with pytest.raises(ValueError, match=message):
        zoo.load(folder)


def test_missing_config_field(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json has no hidden_size"):
        zoo.load(folder)


def test_every_missing_shard_is_named(folder: Path) -> None:
    shards = shard(folder)
    for path in shards[1:3]:
        path.unlink()
    with pytest.raises(CheckpointError, match=f"2 of {len(shards)} shards are missing: {shards[1].name}, {shards[2].name}"):
        zoo.load(shards[0].parent)


def test_shards_without_an_index_are_counted(folder: Path) -> None:
    shards = shard(folder)
    (shards[0].parent / "model.safetensors.index.json").unlink()
    zoo.load(shards[0].parent)
    shards[-1].unlink()
    with pytest.raises(CheckpointError, match=f"{len(shards) - 1} of {len(shards)} shards are there"):
        zoo.load(shards[0].parent)


def test_index_may_not_leave_the_folder(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "../../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside the folder"):
        zoo.load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut short"):
        zoo.load(folder)


def test_wrong_shape_names_both_shapes(folder: Path) -> None:
    edit_tensors(folder, model__norm__weight=torch.ones(31))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\[31\].*\[32\]"):
        zoo.load(folder)


def test_missing_and_unexpected_tensors_are_all_named(folder: Path) -> None:
    edit_tensors(
        folder, model__norm__weight=None, lm_head__weight=None, model__layers__0__self_attn__q_proj__bias=torch.ones(32), odd=torch.ones(1)
    )
    with pytest.raises(CheckpointError) as e:
        zoo.load(folder)
    for name in ("2 missing", "model.norm.weight", "lm_head.weight", "2 unexpected", "q_proj.bias", "odd"):
        assert name in str(e.value)


def test_buffers_that_are_no_weights_are_ignored(folder: Path) -> None:
    edit_tensors(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    zoo.load(folder)


def test_tied_flag_beside_a_different_head(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"the head is tied, but lm_head\.weight differs.*\"tie_word_embeddings\": false"):
        zoo.load(folder)
    edit_tensors(folder, lm_head__weight=load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone())
    model = zoo.load(folder)
    assert model.head.out.weight is model.embed.weight


def test_tied_model_stays_tied_and_is_counted_once(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    model = zoo.load(tmp_path / "tied")
    assert model.head.out.weight is model.embed.weight
    assert sum(p.numel() for p in model.parameters()) == sum(torch.Size(t.shape).numel() for t in model.spec.tensors().values())


def test_not_enough_memory_is_said_before_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_bytes", lambda device: 1000)
    monkeypatch.setattr(loading, "fill", lambda *a: pytest.fail("weights were read"))
    with pytest.raises(loading.NotEnoughMemory, match=r"GiB free.*dtype"):
        zoo.load(folder)


def test_overrides_are_checked(folder: Path) -> None:
    with pytest.raises(zoo.SpecError, match=r"layers\.0\.mixer\.kernel: no kernel named 'egaer'; did you mean 'eager'"):
        zoo.load(folder, override=["layers.*.mixer.kernel=egaer"])


def test_wrong_dtype_word(folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype='float3' is none that weights can have; did you mean 'float32'"):
        zoo.load(folder, dtype="float3")


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin may run code"):
        zoo.load(folder)


@pytest.mark.parametrize("reference", ["package:no_such_package/x.gguf", "package:json", "package:json/none.gguf", "package:json/../os.py"])
def test_package_references(reference: str) -> None:
    with pytest.raises(CheckpointError, match=r"package:json|no package no_such_package|NAME/FILE"):
        open_checkpoint(reference)


def gguf_bytes(tensors: int = 0, keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


@pytest.mark.parametrize(("data", "message"), [
    (b"GGML" + b"\0" * 40, "not a GGUF file"),
    (b"GGUF" + struct.pack("<I", 3), "cut short"),
    (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    (gguf_bytes(keys=1 << 60), "announced"),
    (gguf_bytes(tensors=1 << 60), "announced"),
    (gguf_bytes(keys=1, body=struct.pack("<Q", 1 << 50) + b"x" * 20), "cut short"),
    (gguf_bytes(keys=1, body=struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 58)), "cut short"),
    (gguf_bytes(keys=1, body=struct.pack("<Q", 1) + b"k" + struct.pack("<I", 77) + b"\0" * 8), "value type 77"),
    (gguf_bytes(tensors=1, body=struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 1 << 40, 0, 0)), "cut short"),
    (gguf_bytes(tensors=1, body=struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 32, 250, 0)), "block type 250"),
    (gguf_bytes(tensors=1, body=struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 31, 2, 0)), "rows of 31"),
])  # fmt: skip
def test_bad_gguf_headers(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


@pytest.mark.parametrize(("field", "value"), [
    ("vocab_size", None), ("hidden_size", "64"), ("num_hidden_layers", 10**9), ("num_attention_heads", [4]), ("head_dim", "8"),
    ("intermediate_size", -1), ("rope_parameters", 5), ("hidden_act", []), ("rms_norm_eps", "x"), ("quantization_config", "x"),
    ("num_hidden_layers", 0), ("max_position_embeddings", None), ("num_key_value_heads", 0),
])  # fmt: skip
def test_config_fields_of_the_wrong_kind(folder: Path, field: str, value: object) -> None:
    edit_config(folder, **{field: value})
    with pytest.raises(ValueError, match=r"config\.json|layers\.0|num_hidden_layers|tensors"):
        zoo.load(folder)


def test_every_tensor_of_the_wrong_shape_is_named(folder: Path) -> None:
    edit_tensors(folder, model__norm__weight=torch.ones(31), model__layers__0__input_layernorm__weight=torch.ones(30))
    with pytest.raises(CheckpointError, match=r"2 of another shape.*model\.layers\.0\.input_layernorm|2 of another shape.*model\.norm"):
        zoo.load(folder, lazy=True)


def test_integers_are_no_weights(folder: Path) -> None:
    edit_tensors(folder, model__norm__weight=torch.ones(32, dtype=torch.int8))
    with pytest.raises(CheckpointError, match=r"int8 where the model's norm\.weight has floats"):
        zoo.load(folder)


def test_what_a_failed_call_wrote_is_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.load(folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    cache = model.new_cache(1)
    model(ids[:, :2], cache=cache)
    with monkeypatch.context() as m:
        m.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 2:], cache=cache)
    cache.check()
    torch.testing.assert_close(model(ids[:, 2:], cache=cache), model(ids)[:, 2:])


def test_a_prefix_is_a_whole_name(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "m", num_hidden_layers=12)
    model = zoo.load(tmp_path / "m", lazy=True)
    materialize(model, "layers.1")
    assert {n.split(".")[1] for n, p in model.named_parameters() if not p.is_meta} == {"1"}


@pytest.mark.parametrize(
    "path", ["layers.*.mixer.kernel=linear", "layers.*.mixer.kernel=softcap", "cache=int8", "layers.*.mixer.kernel=flash_v2"]
)
def test_what_changes_the_function_is_saved(folder: Path, tmp_path: Path, path: str) -> None:
    model = zoo.load(folder, override=[path])
    saved = zoo.save(model, tmp_path / "again")
    back, ids = zoo.load(tmp_path / "again"), torch.tensor([[5, 6, 7, 8, 9]])
    torch.testing.assert_close(back(ids), model(ids))
    assert back.spec.cache == model.spec.cache
    assert (saved.transformers is None) == ("flash" in path)


def test_a_container_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert loading.container_bytes(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert loading.container_bytes(tmp_path) > 1 << 60
