"""GGUF files of each architecture, written as llama.cpp's converter does from checkpoints that transformers wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import zoo
from tests.zoo.families.harness import TOLERANCE, Case, ids
from tests.zoo.oracle import relative_error
from zoo.checkpoint import CheckpointError
from zoo.gguf_file import GGUFCheckpoint
from zoo.layouts import rope_rows

KEYS = {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
        "context_length": "max_position_embeddings", "vocab_size": "vocab_size"}  # fmt: skip
RMS = "attention.layer_norm_rms_epsilon"
GEMMA2 = {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
GEMMA3 = {"sliding_window": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 7, "rope_parameters": {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default"}}}  # fmt: skip
GRANITE = {"attention_multiplier": 0.22, "embedding_multiplier": 12.0, "residual_multiplier": 0.3, "logits_scaling": 6.0}
SHORT, LONG = [1.0, 1.125, 1.25, 1.5], [1.0, 2.0, 3.0, 4.0]
LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.25}


@dataclass(frozen=True)
class File:
    """keys: the architecture's own. tensors: besides the weights. changed: what the converter does to a weight of this name."""

    architecture: str
    case: Case
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, list[float]] = field(default_factory=dict)
    changed: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor


def permuted(name: str, tensor: Tensor) -> Tensor:
    """q and k rows as llama.cpp's rotation wants them, in pairs."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    return rope_rows(heads).backward([tensor])[0] if heads else tensor


def shifted(name: str, tensor: Tensor) -> Tensor:
    return tensor + 1 if name.endswith("norm.weight") else tensor


FILES = [
    File("llama", Case("llama", "LlamaForCausalLM", {"attention_bias": True}), {RMS: 1e-6, "rope.dimension_count": 8}, changed=permuted),
    File("qwen2", Case("qwen2", "Qwen2ForCausalLM", {"head_dim": None, "tie_word_embeddings": True}), {RMS: 1e-6}),
    File("qwen3", Case("qwen3", "Qwen3ForCausalLM", {"head_dim": 24}), {RMS: 1e-6, "attention.key_length": 24}),
    File("gemma", Case("gemma", "GemmaForCausalLM", {"head_dim": 24}), {RMS: 1e-6, "attention.key_length": 24}, changed=shifted),
    File("gemma2", Case("gemma2", "Gemma2ForCausalLM", GEMMA2), {RMS: 1e-6, "attention.key_length": 8, "attention.sliding_window": 8,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}, changed=shifted),
    File("gemma3", Case("gemma3", "Gemma3ForCausalLM", GEMMA3), {RMS: 1e-6, "attention.key_length": 8, "attention.sliding_window": 8,
         "rope.freq_base": 500.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, changed=shifted),
    File("phi3", Case("phi3", "Phi3ForCausalLM", {"head_dim": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 12}),
         {RMS: 1e-5, "rope.dimension_count": 8, "rope.freq_base": 500.0, "rope.scaling.original_context_length": 12,
          "rope.scaling.attn_factor": 1.25}, {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}),
    File("olmo2", Case("olmo2", "Olmo2ForCausalLM", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
         "original_max_position_embeddings": 8, "beta_fast": 16.0, "beta_slow": 2.0}}), {RMS: 1e-5, "rope.freq_base": 500.0,
         "rope.scaling.type": "yarn", "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 8}),
    File("granite", Case("granite", "GraniteForCausalLM", GRANITE), {RMS: 1e-6, "attention.scale": 0.22, "embedding_scale": 12.0,
         "residual_scale": 0.3, "logit_scale": 6.0}, changed=permuted),
    File("smollm3", Case("smollm3", "SmolLM3ForCausalLM", {"num_hidden_layers": 4}), {RMS: 1e-6, "rope.dimension_count": 8,
         "rope.freq_base": 2e6}, changed=permuted),
    File("cohere2", Case("cohere2", "Cohere2ForCausalLM", {"head_dim": None, "num_hidden_layers": 4, "sliding_window": 8}),
         {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.0625, "attention.sliding_window": 8}),
]  # fmt: skip
PLAIN_LLAMA = File("llama", Case("llama, no bias", "LlamaForCausalLM"), FILES[0].keys, changed=permuted)


def write(file: File, folder: Path, kind: Kind = Kind.F32) -> tuple[Path, Any]:
    """A GGUF file beside transformers' own; matrices as blocks of ``kind``. Returns its path and transformers' model."""
    theirs = file.case.write(folder)
    path, config = folder / "model.gguf", theirs.config.to_dict()
    writer = gguf.GGUFWriter(path, file.architecture)
    given = {key: config[word] for key, word in KEYS.items()} | file.keys
    for key, value in given.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{file.architecture}.{key}", value)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    table = gguf.TensorNameMap(arch, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        new = table.get_name(name, (".weight", ".bias"))
        assert new is not None, name
        data = file.changed(name, tensor).numpy()
        packed = kind if data.ndim == 2 and data.shape[-1] % 32 == 0 else Kind.F32
        writer.add_tensor(new, gguf.quants.quantize(np.ascontiguousarray(data), packed), raw_dtype=packed)
    for name, values in file.tensors.items():
        writer.add_tensor(name, np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, theirs


@torch.no_grad()
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.architecture)
def test_logits_are_those_of_the_original(file: File, tmp_path: Path) -> None:
    path, theirs = write(file, tmp_path)
    assert relative_error(zoo.load(path)(ids(2)), theirs(ids(2)).logits) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("file", FILES[2:6:3], ids=lambda file: file.architecture)
def test_saved_as_a_folder_it_loads_in_transformers(file: File, tmp_path: Path) -> None:
    path, theirs = write(file, tmp_path / "from")
    assert zoo.save(zoo.load(path), tmp_path / "to").transformers is None
    back = type(theirs).from_pretrained(tmp_path / "to", attn_implementation="eager")
    assert relative_error(back(ids(2)).logits, theirs(ids(2)).logits) < TOLERANCE


@pytest.mark.parametrize("file", [PLAIN_LLAMA, *(f for f in FILES if f.architecture in ("qwen2", "gemma2", "gemma3"))],
                         ids=lambda file: file.architecture)  # fmt: skip
def test_the_files_are_as_transformers_reads_them(file: File, tmp_path: Path) -> None:
    """So the order of rows and the offsets that the tests above write are llama.cpp's. Biases of LLaMA it does not read."""
    path, theirs = write(file, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(again[name], tensor, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.BF16], ids=lambda kind: kind.name)
def test_blocks_are_decoded(kind: Kind, tmp_path: Path) -> None:
    """Against the weights that transformers wrote, rounded by the library and decoded again, in their original order of rows."""
    path, _ = write(FILES[0], tmp_path, kind)
    checkpoint = GGUFCheckpoint(path, "test")
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        packed = kind if tensor.dim() == 2 and tensor.shape[-1] % 32 == 0 else Kind.F32
        rounded = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), packed), packed)
        assert torch.equal(checkpoint.read(name), torch.from_numpy(np.ascontiguousarray(rounded, np.float32)))


def test_the_words_are_the_published_ones(tmp_path: Path) -> None:
    """float32 in the file, the decimal that was meant in the config."""
    path, _ = write(FILES[8], tmp_path)
    config = GGUFCheckpoint(path, "test").config
    assert {word: config[word] for word in GRANITE} == GRANITE
    assert config["rms_norm_eps"] == 1e-6


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    path, _ = write(File("qwen2", FILES[1].case, FILES[1].keys, {"blk.0.attn_sinks.weight": [1.0] * 4}), tmp_path)
    with pytest.raises(CheckpointError, match=r"1 unexpected: blk\.0\.attn_sinks\.weight"):
        zoo.load(path)


def test_an_unknown_scaling_is_refused(tmp_path: Path) -> None:
    path, _ = write(File("qwen2", FILES[1].case, FILES[1].keys | {"rope.scaling.yarn_log_multiplier": 0.1}), tmp_path)
    with pytest.raises(CheckpointError, match=r"qwen2\.rope\.scaling\.yarn_log_multiplier is not supported"):
        zoo.load(path)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'mamba' is not known; known: cohere2, gemma, gemma2"):
        zoo.load(tmp_path / "x.gguf")
