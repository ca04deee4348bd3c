"""Decoder families before LLaMA against transformers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import zoo
from tests.zoo.families.harness import CHECKS, Case, ids, renamed, slow
from tests.zoo.oracle import relative_error
from zoo.checkpoint import CheckpointError
from zoo.family import architecture
from zoo.quantize import quantize
from zoo.saving import family_of, format_of
from zoo.weights import entries

Tensors = dict[str, torch.Tensor]
OWN = {"intermediate_size": None, "num_key_value_heads": None, "head_dim": None}  # fields of the base that these families do not have
GPT2 = {**OWN, "max_position_embeddings": 48}
NEOX = {"num_key_value_heads": None, "head_dim": None}
MPT = {**OWN, "max_position_embeddings": None, "max_seq_len": 48}  # transformers' table of biases ends there
FALCON = {**OWN, "intermediate_size": None, "ffn_hidden_size": 48}
GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}

DEPTH = {"scale_attn_by_inverse_layer_idx": True, "n_inner": 40}
UNSCALED = {"scale_attn_weights": False, "tie_word_embeddings": False, "activation_function": "relu"}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5}}
WHOLE = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
IN_TURN = {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"}
SIX_HEADS = {"hidden_size": 48, "num_attention_heads": 6, "apply_residual_connection_post_layernorm": True}
ONE_NORM = {"num_ln_in_parallel_attn": 1, "bias": True, "tie_word_embeddings": False}
ALIBI = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}

CASES = [
    Case("gpt2", "GPT2LMHeadModel", GPT2),
    slow(Case("gpt2, scaled by depth", "GPT2LMHeadModel", {**GPT2, **DEPTH})),
    slow(Case("gpt2, not scaled", "GPT2LMHeadModel", {**GPT2, **UNSCALED})),
    Case("gpt-neox", "GPTNeoXForCausalLM", NEOX),
    slow(Case("gpt-neox, one after the other, half rotated", "GPTNeoXForCausalLM", {**NEOX, **IN_TURN, **HALF})),
    slow(Case("gpt-neox, whole heads rotated, tied", "GPTNeoXForCausalLM", {**NEOX, "tie_word_embeddings": True, **WHOLE})),
    Case("bloom", "BloomForCausalLM", OWN),
    slow(Case("bloom, six heads, residual after the norm", "BloomForCausalLM", {**OWN, **SIX_HEADS})),
    Case("mpt", "MptForCausalLM", MPT),
    slow(Case("mpt, clipped", "MptForCausalLM", {**MPT, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}})),
    Case("falcon, multi-query", "FalconForCausalLM", FALCON),
    Case("falcon, grouped, two norms", "FalconForCausalLM", {**FALCON, **GROUPED}),
    slow(Case("falcon, grouped, one norm, biases", "FalconForCausalLM", {**FALCON, **GROUPED, **ONE_NORM})),
    # transformers' eager attention adds the biases twice
    slow(Case("falcon, alibi, one after the other", "FalconForCausalLM", {**FALCON, **ALIBI}, attention="sdpa")),
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case, check: str, written: Callable[[Case], tuple[Path, Any]]) -> None:
    CHECKS[check](case, *written(case))


PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200, "pythia-160m": 162_322_944,
    "pythia-1b": 1_011_781_632, "pythia-6.9b": 6_857_302_016, "pythia-12b": 11_846_072_320, "gpt-neox-20b": 20_554_567_680,
    "bloom-560m": 559_214_592, "bloom-7b1": 7_069_016_064, "bloom": 176_247_271_424, "mpt-7b": 6_649_286_656, "mpt-30b": 29_957_200_896,
    "falcon-rw-1b": 1_311_625_216, "falcon-7b": 6_921_720_704, "falcon-40b": 41_303_293_952, "falcon-180b": 178_557_088_768,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_models_have_the_published_size(name: str) -> None:
    spec = zoo.spec(name)
    assert sum(math.prod(t.shape) for t in spec.parameters().values()) == PUBLISHED[name]
    assert family_of(spec).read(family_of(spec).write(spec, {})) == architecture(spec)


# ---- what configs that transformers writes do not show -----------------------------------------------------------------------


def folder_of(name: str, written: Callable[[Case], tuple[Path, Any]]) -> tuple[Path, Any]:
    cases = [case if isinstance(case, Case) else case.values[0] for case in CASES]
    return written(next(case for case in cases if case.name == name))


@pytest.mark.parametrize(("name", "buffers"), [
    ("gpt2", {"h.0.attn.bias": torch.ones(1, 1, 48, 48), "h.1.attn.masked_bias": torch.tensor(-1e4)}), ("bloom", {}), ("mpt", {}),
])  # fmt: skip
def test_files_without_the_prefix(name: str, buffers: Tensors, tmp_path: Path, written: Callable[[Case], tuple[Path, Any]]) -> None:
    """As gpt2 and bloom-560m were published; the first with its causal mask."""
    folder, _ = folder_of(name, written)
    bare = renamed(folder, tmp_path / "bare", lambda n: n.removeprefix("transformer."), buffers)
    assert torch.equal(zoo.load(bare)(ids(2)), zoo.load(folder)(ids(2)))


@pytest.mark.parametrize(("name", "config", "kept"), [
    ("gpt-neox", {"rope_parameters": None, "rotary_pct": 0.25, "rotary_emb_base": 10000}, {"rotary_pct": 0.25, "rotary_emb_base": 10000}),
    ("bloom", {"hidden_size": None, "n_embed": 32, "n_head": None, "num_attention_heads": 4}, {"n_embed": 32, "num_attention_heads": 4}),
    ("falcon, multi-query", {"rope_parameters": None, "rope_theta": 10000.0}, {"rope_theta": 10000.0}),
])  # fmt: skip
def test_first_configs(
    name: str, config: dict[str, Any], kept: dict[str, Any], tmp_path: Path, written: Callable[[Case], tuple[Path, Any]]
) -> None:
    """The words that published files still use mean the same, and are used when such a model is saved."""
    folder, theirs = folder_of(name, written)
    old = renamed(folder, tmp_path / "old", **config)
    assert zoo.spec(old) == zoo.spec(folder)
    assert zoo.save(zoo.load(old), tmp_path / "again").transformers is None
    again = json.loads((tmp_path / "again/config.json").read_text())
    assert {word: again.get(word) for word in config} == {word: kept.get(word) for word in config}
    back = type(theirs).from_pretrained(tmp_path / "again", attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(back(ids(2)).logits, theirs(ids(2)).logits)


@torch.no_grad()
def test_mpt_follows_its_largest_bias(tmp_path: Path, written: Callable[[Case], tuple[Path, Any]]) -> None:
    """transformers reads past alibi_bias_max, 16 in MPT-7B-StoryWriter, unless it is told."""
    folder, _ = folder_of("mpt", written)
    other = renamed(folder, tmp_path / "other", attn_config={"alibi_bias_max": 16})
    theirs = transformers.MptForCausalLM.from_pretrained(other).eval()
    plain = theirs(ids(2)).logits
    theirs.transformer.build_mpt_alibi_tensor = lambda heads, length, device=None: build_mpt_alibi_tensor(heads, length, 16, device)
    got, want = zoo.load(other)(ids(2)), theirs(ids(2)).logits
    assert relative_error(got, want) < 1e-5 < 1e-2 < relative_error(plain, want)


REFUSED = [
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True, supported is False"),
    ("gpt2", {"activation_function": "mish"}, "activation_function 'mish' is not supported"),
    ("gpt2", {"n_head": 5}, "hidden_size 32 must be a multiple of num_attention_heads 5"),
    ("gpt2", {"n_layer": 10**9}, "n_layer is 1000000000, it must lie in 1.."),
    ("mpt", {"no_bias": False}, "no_bias is False, supported is True"),
    ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale is 'inv_sqrt_d_model', supported is None"),
    ("mpt", {"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm'"),
    ("mpt", {"attn_config": {"alibi": False, "qk_ln": True}}, "alibi is False, supported is True; qk_ln is True, supported is False"),
    ("falcon, grouped, two norms", {"parallel_attn": False}, "parallel_attn is False"),
    ("falcon, multi-query", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2, which needs new_decoder_architecture"),
]


@pytest.mark.parametrize(("name", "change", "says"), REFUSED)
def test_what_is_not_supported_is_said(
    name: str, change: dict[str, Any], says: str, tmp_path: Path, written: Callable[[Case], tuple[Path, Any]]
) -> None:
    folder, _ = folder_of(name, written)
    with pytest.raises(CheckpointError, match=re.escape(says)):
        zoo.load(renamed(folder, tmp_path / "odd", **change))


SWAPS = [
    ("mpt", "layers.0.wiring=parallel_norms", "wiring"),
    ("bloom", "layers.*.mlp.activation=relu", "activation"),
    ("gpt2", "embed.position.count=40", "count"),
    ("falcon, multi-query", "layers.*.mixer.pattern={name: window, size: 8}", "pattern"),
    ("gpt-neox", "layers.1.mixer.position.theta=5e5", "theta"),
]


@pytest.mark.parametrize(("name", "edit", "word"), SWAPS)
def test_what_a_config_cannot_say_is_not_saved_as_if_it_could(
    name: str, edit: str, word: str, written: Callable[[Case], tuple[Path, Any]]
) -> None:
    folder, _ = folder_of(name, written)
    spec = zoo.override(zoo.spec(folder), edit)
    with pytest.raises(ValueError, match=rf"config can only say|cannot say all of this model.*{word}"):
        family_of(spec).write(spec, json.loads((folder / "config.json").read_text()))


def test_a_packed_module_leaves_the_tensor_that_it_shared(written: Callable[[Case], tuple[Path, Any]]) -> None:
    """Each tensor of the model is in the table once, though one of q, k and v is stored in another way than the others."""
    folder, _ = folder_of("gpt2", written)
    spec = zoo.override(zoo.spec(folder), "layers.0.mixer.projection.k={name: packed_int, bits: 4, group_size: 16}")
    table = entries(spec, family_of(spec).rules(spec), format_of(spec, "compressed_tensors"))
    names = [n for e in table for n in e.ours]
    assert sorted(names) == sorted(spec.tensors().keys() - {"head.out.weight"})
    assert ("transformer.h.1.attn.c_attn.weight",) in [e.theirs for e in table]
    assert ("layers.0.mixer.projection.q.weight",) in [e.theirs for e in table]


@pytest.mark.parametrize("name", ["gpt2", "falcon, multi-query"])
@torch.no_grad()
def test_packed_weights_of_fused_tensors(name: str, tmp_path: Path, written: Callable[[Case], tuple[Path, Any]]) -> None:
    """q, k and v are stored apart, v not even packed; zoo reads that, and the result says that transformers does not."""
    folder, _ = folder_of(name, written)
    model = zoo.load(folder)
    quantize(model, "rtn", bits=4, group_size=16, rules=["layers.*.mixer.projection.v=keep"])
    result = zoo.save(model, tmp_path / "packed")
    assert result.transformers is not None
    assert "in one tensor with others, which packed weights cannot be" in result.transformers
    again = zoo.load(tmp_path / "packed")
    assert again.spec.layers[0].mixer.projection.k.name == "packed_int"
    assert again.spec.layers[0].mixer.projection.v.name == "dense"
    assert torch.equal(again(ids(2)), model(ids(2)))
