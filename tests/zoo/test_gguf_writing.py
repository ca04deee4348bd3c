"""GGUF files that zoo.save writes, read again here and by transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import zoo
from tests.zoo.families.harness import Case, ids
from tests.zoo.oracle import relative_error
from zoo.checkpoint import CheckpointError
from zoo.components.linear.packed_float import PackedFloat
from zoo.components.linear.packed_int import PackedInt
from zoo.components.numerics import integer
from zoo.gguf_blocks import packed_bytes, packed_kind
from zoo.gguf_file import GGUFCheckpoint, read_header
from zoo.gguf_tokenizers import to_gguf
from zoo.quantize import quantize
from zoo.tokenizers import PRE_TOKENIZERS, from_gguf

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
          "rope_theta": 500000.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 500.0}
CASES = [
    Case("llama", "LlamaForCausalLM", SIZES),
    Case("llama, tied", "LlamaForCausalLM", SIZES | {"tie_word_embeddings": True}),
    Case("llama, biases", "LlamaForCausalLM", SIZES | {"attention_bias": True}),
    Case("llama 3", "LlamaForCausalLM", SIZES | {"rope_parameters": LLAMA3}),
    Case("qwen2", "Qwen2ForCausalLM", SIZES | {"head_dim": None, "tie_word_embeddings": True}),
    Case("qwen2, linear", "Qwen2ForCausalLM", SIZES | {"head_dim": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0,
                                                                                           "rope_theta": 500.0}}),
    Case("qwen3", "Qwen3ForCausalLM", SIZES | {"head_dim": 128}),
    Case("olmo2, yarn", "Olmo2ForCausalLM", SIZES | {"head_dim": None, "rope_parameters": YARN}),
    Case("smollm3", "SmolLM3ForCausalLM", SIZES | {"head_dim": None, "num_hidden_layers": 4}),
]  # fmt: skip


def loaded(folder: Path, case: Case = CASES[0]) -> zoo.Model:
    case.write(folder / "model")
    return zoo.load(folder / "model")


def weights(model: zoo.Model) -> dict[str, torch.Tensor]:
    return {name: m.dense_weight(torch.float32) for name, m in model.named_modules() if hasattr(m, "dense_weight")}  # type: ignore[operator]


# ---- models ------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_written_model_is_read_again(case: Case, tmp_path: Path) -> None:
    model = loaded(tmp_path, case)
    saved = zoo.save(model, tmp_path / "x.gguf", format="gguf")
    again = zoo.load(tmp_path / "x.gguf")
    assert again.spec == model.spec
    assert torch.equal(again(ids(2)), model(ids(2)))
    assert saved.files == ["x.gguf"]
    assert saved.bytes == (tmp_path / "x.gguf").stat().st_size
    assert [p.name for p in tmp_path.iterdir() if p.name != "model"] == ["x.gguf"]


@torch.no_grad()
def test_norms_with_an_offset(tmp_path: Path) -> None:
    """Which float32 sums do not return to the bit."""
    model = loaded(tmp_path, Case("gemma", "GemmaForCausalLM", SIZES))
    zoo.save(model, tmp_path / "x.gguf", format="gguf")
    again = zoo.load(tmp_path / "x.gguf")
    assert again.spec == model.spec
    assert relative_error(again(ids(2)), model(ids(2))) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4], CASES[6]], ids=lambda case: case.name)
def test_transformers_reads_it(case: Case, tmp_path: Path) -> None:
    model = loaded(tmp_path, case)
    quantize(model, "rtn", group_size=32, progress=False)
    assert zoo.save(model, tmp_path / "x.gguf", format="gguf").transformers is None
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    assert relative_error(theirs(ids(2)).logits, model(ids(2))) < 1e-5


@pytest.mark.parametrize(("case", "reason"), [
    (CASES[2], "passes over the biases of LLaMA"), (CASES[3], "passes over rope scaling"), (CASES[5], "passes over rope scaling"),
    (Case("qwen3", "Qwen3ForCausalLM", SIZES | {"head_dim": 32}), "takes heads to be 128 wide, not 32"),
    (CASES[8], "knows no architecture smollm3"),
], ids=lambda value: getattr(value, "name", ""))  # fmt: skip
def test_what_transformers_does_not_read_is_said(case: Case, reason: str, tmp_path: Path) -> None:
    assert zoo.save(loaded(tmp_path, case), tmp_path / "x.gguf", format="gguf").transformers == f"its reader of GGUF {reason}"


@pytest.mark.parametrize(("method", "options", "kind"), [
    ("rtn", {}, Kind.Q4_0), ("rtn", {"bits": 2}, Kind.Q4_0), ("rtn", {"bits": 8}, Kind.Q8_0), ("mxfp", {}, Kind.MXFP4),
    ("rtn", {"symmetric": False}, Kind.Q5_0),
], ids=str)  # fmt: skip
def test_packed_weights_keep_their_values(method: str, options: dict[str, Any], kind: Kind, tmp_path: Path) -> None:
    model = loaded(tmp_path)
    quantize(model, method, progress=False, **({"group_size": 32} if method == "rtn" else {}), **options)
    zoo.save(model, tmp_path / "x.gguf", format="gguf")
    ours, theirs = weights(model), weights(zoo.load(tmp_path / "x.gguf"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert read_header(tmp_path / "x.gguf")[1]["blk.1.attn_q.weight"].kind == kind


@pytest.mark.parametrize(("word", "kind", "most"), [
    ("bf16", Kind.BF16, 0.002), ("f16", Kind.F16, 0.0003), ("q8_0", Kind.Q8_0, 0.008), ("q6_k", Kind.Q6_K, 0.021),
    ("q5_0", Kind.Q5_0, 0.05), ("q4_k", Kind.Q4_K, 0.085), ("Q4_0", Kind.Q4_0, 0.095), ("mxfp4", Kind.MXFP4, 0.13),
])  # fmt: skip
def test_plain_weights_are_rounded_as_asked(word: str, kind: Kind, most: float, tmp_path: Path) -> None:
    model = loaded(tmp_path, Case("wide", "LlamaForCausalLM", {"hidden_size": 256, "intermediate_size": 96, "head_dim": 64}))
    zoo.save(model, tmp_path / "x.gguf", format="gguf", blocks=word)
    metadata, blocks = read_header(tmp_path / "x.gguf")
    narrower = {Kind.Q4_K: Kind.Q5_0, Kind.Q6_K: Kind.Q8_0}.get(kind, kind)
    outer = kind if kind in (Kind.BF16, Kind.F16, Kind.Q8_0) else Kind.Q6_K
    wanted = {"blk.0.attn_k.weight": kind, "blk.0.ffn_down.weight": narrower, "token_embd.weight": outer, "output.weight": outer,
              "blk.0.attn_norm.weight": Kind.F32}  # fmt: skip
    assert {name: blocks[name].kind for name in wanted} == wanted
    assert gguf.LlamaFileType(metadata["general.file_type"]).name.removeprefix("MOSTLY_").startswith(kind.name)
    ours, theirs = (weights(m)["layers.1.mixer.projection.q"] for m in (model, zoo.load(tmp_path / "x.gguf")))
    assert 0 < (theirs - ours).norm() / ours.norm() < most


# ---- blocks ------------------------------------------------------------------------------------------------------------------


def held(storage: PackedInt, zero: int | None = None, scale: float | None = None) -> dict[str, torch.Tensor]:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    fitted, zeros = integer.fit(weight, storage.grid)
    fitted = fitted if scale is None else torch.full_like(fitted, scale)
    zeros = zeros if zero is None else torch.full_like(zeros, zero)
    return storage.encode(integer.quantize(weight, fitted, zeros, storage.bits), fitted, zeros)


@pytest.mark.parametrize(("storage", "zero", "kind"), [
    (PackedInt(bits=3, group_size=32), None, Kind.Q4_0), (PackedInt(bits=4, group_size=64), None, Kind.Q4_0),
    (PackedInt(bits=5, group_size=32), None, Kind.Q5_0), (PackedInt(bits=6, group_size=32), None, Kind.Q8_0),
    (PackedInt(bits=4, scale_dtype="float16"), None, Kind.Q4_0), (PackedInt(group_size=32, symmetric=False), 8, Kind.Q4_1),
    (PackedInt(group_size=32, symmetric=False, scale_dtype="float16"), 7, Kind.Q5_0),
    (PackedInt(bits=7, group_size=32, symmetric=False), None, Kind.Q8_0),
])  # fmt: skip
def test_the_smallest_blocks_that_hold_a_grid(storage: PackedInt, zero: int | None, kind: Kind) -> None:
    tensors = held(storage, zero)
    assert packed_kind(storage, tensors, 64) == kind
    module = storage.build(64, 8, False)
    module.hold(tensors)
    found = torch.from_numpy(gguf.quants.dequantize(packed_bytes(storage, tensors, kind, 64), kind))
    assert torch.equal(found, module.dense_weight(torch.float32))


@pytest.mark.parametrize(("storage", "scale", "message"), [
    (PackedInt(), None, "float16, which is all that blocks have, does not hold its scales"),
    (PackedInt(group_size=32), 1e-30, "does not hold its scales"),
    (PackedInt(group_size=16), None, "only groups of neighbours, 32 or a multiple of it"),
    (PackedInt(group_size=32, scattered=True), None, "only groups of neighbours"),
    (PackedInt(bits=8, group_size=32, symmetric=False), None, "no blocks hold 8 bits with zero points"),
])  # fmt: skip
def test_grids_that_no_blocks_hold(storage: PackedInt, scale: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_kind(storage, held(storage, scale=scale), 64)


def test_floats_that_no_blocks_hold() -> None:
    storage = PackedFloat(element="e2m1", group_size=32, scale="e8m0")
    for other in (replace(storage, scale="e4m3"), replace(storage, element="e4m3"), replace(storage, group_size=16)):
        with pytest.raises(ValueError, match="of packed floats only MXFP4 is held"):
            packed_kind(other, {}, 64)


def test_groups_of_zeros_may_have_any_scale() -> None:
    storage = PackedInt(group_size=32)
    scale, zero = integer.fit(torch.zeros(8, 64), storage.grid)
    assert packed_kind(storage, storage.encode(torch.full((8, 64), 8, dtype=torch.uint8), scale, zero), 64) == Kind.Q4_0


# ---- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options", "error", "message"), [
    ("x.gguf", {"blocks": "q4_l"}, ValueError, "there are none named 'q4_l'; did you mean 'q4_"),
    ("x.gguf", {"shard_bytes": 10}, ValueError, "written whole; leave shard_bytes out"),
    ("x", {}, ValueError, r"a GGUF file is named NAME\.gguf"),
    ("model", {}, ValueError, r"a GGUF file is named NAME\.gguf"),
    ("x", {"format": "compressed_tensors", "blocks": "q4_0"}, ValueError, "blocks='q4_0' is for format='gguf'"),
])  # fmt: skip
def test_mistakes(name: str, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    model = loaded(tmp_path)
    with pytest.raises(error, match=message):
        zoo.save(model, tmp_path / name, **({"format": "gguf"} | options))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("case", "edits", "message"), [
    (CASES[0], ["layers.0.mixer.pattern={name: window, size: 8}"], "config cannot say all of this model"),
    (Case("gpt2", "GPT2LMHeadModel", dict.fromkeys(("hidden_size", "intermediate_size", "head_dim", "num_key_value_heads"))), [],
     "no GGUF file holds a gpt2 model here; known: cohere2, gemma"),
    (Case("dynamic", "LlamaForCausalLM", SIZES | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}}), [],
     "rope scaling dynamic is not written as GGUF; supported: llama3, linear, yarn"),
    (Case("llama3", "LlamaForCausalLM", SIZES | {"rope_parameters": LLAMA3 | {"factor": 7.0}}), [], "divisors of no published Llama 3"),
], ids=lambda value: getattr(value, "name", ""))  # fmt: skip
def test_models_that_a_file_cannot_say(case: Case, edits: list[str], message: str, tmp_path: Path) -> None:
    case.write(tmp_path / "model")
    model = zoo.load(tmp_path / "model", override=edits)
    with pytest.raises(ValueError, match=message):
        zoo.save(model, tmp_path / "x.gguf", format="gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_every_packed_weight_that_is_not_held_is_named(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    quantize(model, "rtn", group_size=None, progress=False)
    with pytest.raises(ValueError, match=r"layers\.0\.mixer\.projection\.q: float16.*layers\.1\.mlp\.down: .*quantized='dequantize'"):
        zoo.save(model, tmp_path / "x.gguf", format="gguf", blocks="q4_0")


def test_other_files_are_never_replaced(tmp_path: Path) -> None:
    model, path = loaded(tmp_path), tmp_path / "x.gguf"
    zoo.save(model, path, format="gguf")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        zoo.save(model, path, format="gguf")
    zoo.save(model, path, format="gguf", overwrite=True, blocks="f16")
    path.write_text("notes")
    with pytest.raises(FileExistsError, match="no GGUF file"):
        zoo.save(model, path, format="gguf", overwrite=True)


def test_a_check_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    model, path = loaded(tmp_path), tmp_path / "x.gguf"
    zoo.save(model, path, format="gguf")
    before = path.read_bytes()

    def check(written: Path) -> None:
        assert zoo.load(written).spec == model.spec
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        zoo.save(model, path, format="gguf", blocks="f16", overwrite=True, check=check)
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"model", "x.gguf"}


# ---- tokenizers --------------------------------------------------------------------------------------------------------------


def byte_level(split: str) -> PreTrainedTokenizerFast:
    """A small byte-level tokenizer that cuts text as one of GGUF's names does."""
    corpus = ["hello world 12345 it's they'll we", "a b  c\n\nd   e", "naïve 你好 !!! ... foo_bar"] * 4
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False, special_tokens=["<s>", "</s>"]
    )
    backend.train_from_iterator(corpus, trainer)
    probe = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split, "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    backend.pre_tokenizer = from_gguf(probe).backend_tokenizer.pre_tokenizer
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template="{{ messages }}")


@pytest.mark.parametrize("split", ["smollm", "qwen2", "llama3", "gpt-2", "tekken", "deepseek-v3"])
def test_byte_level_tokenizers_are_named_by_how_they_cut(split: str) -> None:
    tokenizer = byte_level(split)
    keys = to_gguf(tokenizer)
    again = from_gguf(keys)
    assert PRE_TOKENIZERS[keys["tokenizer.ggml.pre"]].splits == PRE_TOKENIZERS[split].splits
    text = "Use <tool> 3 times; it's 100% fine</s>"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.chat_template == "{{ messages }}"
    assert (again.bos_token, again.eos_token) == ("<s>", "</s>")


def test_tokenizers_without_a_name_are_not_written(tmp_path: Path) -> None:
    tokenizer = byte_level("gpt-2")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[attr-defined]
        [pre_tokenizers.Split("e", "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    with pytest.raises(CheckpointError, match="none of the kinds of tokenizers that GGUF names"):
        to_gguf(tokenizer)
    CASES[0].write(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.warns(UserWarning, match="written without a tokenizer, which llama.cpp needs"):
        zoo.save(zoo.load(tmp_path / "model"), tmp_path / "x.gguf", format="gguf")
    assert not any(key.startswith("tokenizer") for key in read_header(tmp_path / "x.gguf")[0])


@pytest.mark.parametrize("name", ["stories260K", "babyllama"])
def test_a_sentencepiece_tokenizer_and_its_copy(name: str, shared_data: Path, tmp_path: Path) -> None:
    model = zoo.load(shared_data / "weights" / name)
    zoo.save(model, tmp_path / "a.gguf", format="gguf", blocks="f16")
    again = zoo.load(tmp_path / "a.gguf")
    zoo.save(again, tmp_path / "b.gguf", format="gguf")
    first, second = (read_header(tmp_path / file)[0] for file in ("a.gguf", "b.gguf"))
    assert {k: v for k, v in first.items() if k.startswith("tokenizer")} == {k: v for k, v in second.items() if k.startswith("tokenizer")}
    assert model.source is not None
    text = "Once upon a time, there was a little girl named Lily. She didn't  like 3 dogs!"
    expected = model.source.tokenizer(text)["input_ids"]
    for file in ("a.gguf", "b.gguf"):
        tokenizer = GGUFCheckpoint(tmp_path / file, file).tokenizer
        assert tokenizer(text)["input_ids"] == expected
        assert tokenizer.decode(expected, skip_special_tokens=True) == text
