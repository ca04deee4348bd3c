"""Dense decoder families against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.zoo.families.harness import CHECKS, TOLERANCE, Case, ids, slow
from tests.zoo.oracle import relative_error

SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 3.0, 4.0]
LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": SHORT, "long_factor": LONG}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
ALTERNATING = {"num_hidden_layers": 4, "sliding_window": 8}
ROPES = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
         "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}  # fmt: skip

CASES = [
    slow(Case("llama", "LlamaForCausalLM", {"head_dim": 24})),
    slow(Case("llama, biases, tied", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})),
    slow(Case("llama, llama3 scaling", "LlamaForCausalLM", {"rope_parameters": LLAMA3})),
    slow(Case("llama, linear, one kv head", "LlamaForCausalLM", {"rope_parameters": LINEAR, "num_key_value_heads": 1})),
    Case("mistral", "MistralForCausalLM", {"sliding_window": 8}),
    slow(Case("mistral, no window", "MistralForCausalLM", {"sliding_window": None, "head_dim": 24})),
    slow(Case("qwen2", "Qwen2ForCausalLM", {"tie_word_embeddings": True})),
    Case("qwen2, window from layer 1", "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    slow(Case("qwen2, yarn", "Qwen2ForCausalLM", {"rope_parameters": YARN, "head_dim": None})),
    Case("qwen3", "Qwen3ForCausalLM", {"head_dim": 24}),
    slow(Case("qwen3, biases, window, tied", "Qwen3ForCausalLM", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 8,
         "max_window_layers": 1, "tie_word_embeddings": True})),
    Case("gemma", "GemmaForCausalLM", {}),
    slow(Case("gemma, legacy gelu, biases, untied", "GemmaForCausalLM",
         {"hidden_act": "gelu", "attention_bias": True, "tie_word_embeddings": False})),
    Case("gemma2", "Gemma2ForCausalLM", {"sliding_window": 8, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 1.5}),
    slow(Case("gemma2, no caps, biases, untied", "Gemma2ForCausalLM", {**ALTERNATING, "query_pre_attn_scalar": 8, "attention_bias": True,
         "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False})),
    Case("gemma3_text", "Gemma3ForCausalLM", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
         "query_pre_attn_scalar": 20, "rope_parameters": ROPES}),
    slow(Case("gemma3_text, five to one, final cap, untied", "Gemma3ForCausalLM", {"num_hidden_layers": 7, "sliding_window": 8,
         "final_logit_softcapping": 1.5, "attention_bias": True, "tie_word_embeddings": False})),
    slow(Case("gemma3_text, bidirectional", "Gemma3ForCausalLM", {"sliding_window": 8, "use_bidirectional_attention": True,
         "layer_types": ["sliding_attention", "full_attention"]}, cached=False)),
    Case("phi3", "Phi3ForCausalLM", {"head_dim": None}),
    Case("phi3, longrope beyond its context", "Phi3ForCausalLM", {"head_dim": None, "rope_parameters": LONGROPE,
         "original_max_position_embeddings": 12}, cached=False),
    slow(Case("phi3, partial longrope", "Phi3ForCausalLM", {"head_dim": None, "original_max_position_embeddings": 12, "rope_parameters": {
         **LONGROPE, "short_factor": SHORT[:3], "long_factor": LONG[:3], "partial_rotary_factor": 0.75, "attention_factor": 1.25}},
         cached=False)),
    slow(Case("phi3, partial, window, tied", "Phi3ForCausalLM", {"head_dim": None, "sliding_window": 8, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}})),
    Case("olmo2", "Olmo2ForCausalLM", {}),
    slow(Case("olmo2, biases, yarn", "Olmo2ForCausalLM", {"attention_bias": True, "rope_parameters": YARN})),
    Case("granite", "GraniteForCausalLM", {"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.22,
         "logits_scaling": 6.0}),
    slow(Case("granite, biases, tied", "GraniteForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})),
    Case("smollm3", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    slow(Case("smollm3, windows without rope, biases, untied", "SmolLM3ForCausalLM", {**ALTERNATING, "use_sliding_window": True,
         "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False})),
    slow(Case("stablelm", "StableLmForCausalLM", {"head_dim": None})),
    Case("stablelm, norms of heads, parallel", "StableLmForCausalLM", {"head_dim": None, "qk_layernorm": True, "use_qkv_bias": True,
         "use_parallel_residual": True, "partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    Case("cohere2", "Cohere2ForCausalLM", {**ALTERNATING, "head_dim": None}),
    slow(Case("cohere2, biases, untied", "Cohere2ForCausalLM", {"head_dim": None, "sliding_window": 8, "attention_bias": True,
         "layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": False, "logit_scale": 0.25})),
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case, check: str, written: Callable[[Case], tuple[Path, Any]]) -> None:
    CHECKS[check](case, *written(case))


WRONG = [
    ("qwen2, window from layer 1", "layers.1.mixer.pattern.size=9"),
    ("qwen3", "layers.1.mixer.projection.qk_norm_at=rotated"),
    ("gemma", "embed.scale=1.0"),
    ("gemma2", "layers.0.mixer.kernel.cap=2.1"),
    ("gemma2", "layers.0.mixer.projection.logit_scale=0.2237"),
    ("gemma3_text", "layers.0.mixer.position.theta=51.0"),
    ("phi3, longrope beyond its context", "layers.*.mixer.position.scaling.context=100"),
    ("olmo2", "layers.0.norm.eps=0.001"),
    ("granite", "layers.1.wiring.scale=0.221"),
    ("smollm3", "layers.1.mixer.position=rope"),
    ("stablelm, norms of heads, parallel", "layers.*.mixer.position.width=2"),
    ("cohere2", "layers.0.mixer.position.layout=half"),
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "edit"), WRONG, ids=[edit for _, edit in WRONG])
def test_a_wrong_reading_shows(name: str, edit: str, written: Callable[[Case], tuple[Path, Any]]) -> None:
    folder, theirs = written(next(case for case in CASES if isinstance(case, Case) and case.name == name))
    assert relative_error(zoo.load(folder, override=[edit])(ids(2)), theirs(ids(2)).logits) > 10 * TOLERANCE
