"""Named models with mixtures of experts have the published sizes, and published configs in the older spelling say the same."""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from zoo.components import registry
from zoo.describe import summarize

TOTALS = {  # billions of parameters, as published or summed over the files of the release
    "mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6, "qwen1.5-moe-a2.7b": 14.3, "qwen2-57b-a14b": 57.4, "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1, "olmoe-1b-7b": 6.92, "deepseek-v2-lite": 15.7, "deepseek-v2": 235.7, "deepseek-v3": 671.0,
    "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "llama4-scout": 107.8, "llama4-maverick": 400.7, "qwen3-next-80b-a3b": 79.7,
    "minimax-text-01": 456.1,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "rope_theta": 1e6,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "sliding_window": None},
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 48, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "moe_layer_freq": 1, "vocab_size": 129280,
        "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": YARN, "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": 1},
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
        "vocab_size": 201088, "max_position_embeddings": 131072, "initial_context_length": 4096, "rope_theta": 150000,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096},
        "sliding_window": 128, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "attention_bias": True},
    "llama4-scout": {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "no_rope_layers": [], "attention_chunk_size": 8192,
        "attn_temperature_tuning": 4, "floor_scale": 8192, "attn_scale": 0.1, "use_qk_norm": True, "vocab_size": 202048,
        "max_position_embeddings": 10485760, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192}},
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_hidden_layers": 48, "full_attention_interval": 4, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10,
        "norm_topk_prob": True, "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_scaling": None, "rms_norm_eps": 1e-6,
        "vocab_size": 151936, "max_position_embeddings": 262144, "decoder_sparse_step": 1, "mlp_only_layers": []},
}  # fmt: skip


@pytest.mark.parametrize("name", TOTALS)
def test_sizes_are_those_published(name: str) -> None:
    assert summarize(zoo.spec(name)).parameters / 1e9 == pytest.approx(TOTALS[name], rel=2e-3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_say_the_same(name: str) -> None:
    config = PUBLISHED[name]
    family: Any = registry.get("family", config["model_type"]).spec()
    spec = family.read(config)
    assert spec == zoo.spec(name)
    kept = family.write(spec, config)
    assert {k: kept[k] for k in ("hidden_size", "rope_theta")} == {k: config[k] for k in ("hidden_size", "rope_theta")}
    assert "rope_parameters" not in kept, "a config is written in the spelling that it came in"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: 'sigmoid'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads 8 is not supported; supported: 128"),
        ("mixtral-8x7b", {"num_local_experts": 10**9}, r"num_local_experts is 1000000000; it must lie in 1\.\.10000"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types says nothing of layer 1"),
        (
            "qwen3-next-80b-a3b",
            {"layer_types": ["mamba"] * 48},
            "layer_types says 'mamba' of layer 0; it must say linear_attention or full",
        ),
        ("llama4-scout", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
        ("llama4-scout", {"layer_types": ["chunked_attention"] * 48, "attention_chunk_size": None}, "there is no attention_chunk_size"),
        ("gpt-oss-20b", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu'"),
    ],
)
def test_what_a_family_cannot_do_is_refused(name: str, change: dict[str, Any], reason: str) -> None:
    config = PUBLISHED[name] | change
    family: Any = registry.get("family", config["model_type"]).spec()
    with pytest.raises(ValueError, match=reason):
        family.read(config)
