"""Config files as they were published, with older words and fields left out, against what transformers makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers import AutoConfig

from zoo.components.contracts import Pattern
from zoo.components.pattern.window import Window
from zoo.components.position.none import NoPosition
from zoo.components.position.rope import Rope
from zoo.components.rope_scaling.longrope import LongRope
from zoo.components.rope_scaling.yarn import Yarn
from zoo.components.spec import override
from zoo.family import family_for
from zoo.model import ModelSpec

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
PUBLISHED: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e6, "max_position_embeddings": 64},
    "mistral with what is left out": {"model_type": "mistral"},
    "llama3": {"model_type": "llama", "rope_theta": 5e5, "max_position_embeddings": 64,
               "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 8}},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2,
              "tie_word_embeddings": True},
    "qwen2, yarn": {"model_type": "qwen2", "rope_theta": 1e6, "max_position_embeddings": 64,
                    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
    "qwen2, windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "rope_scaling": None},
    "gemma": {"model_type": "gemma", "head_dim": 8, "hidden_act": "gelu_pytorch_tanh", "rope_theta": 10000.0},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 8, "hidden_act": "gelu_pytorch_tanh"},
    "gemma3": {"model_type": "gemma3_text", "sliding_window_pattern": 3, "sliding_window": 8, "rope_theta": 1e6,
               "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3 with what is left out": {"model_type": "gemma3_text", "head_dim": 8},
    "phi3": {"model_type": "phi3", "rope_scaling": LONGROPE, "original_max_position_embeddings": 16, "max_position_embeddings": 64},
    "phi4, partial": {"model_type": "phi3", "partial_rotary_factor": 0.75, "rope_theta": 1e4, "original_max_position_embeddings": 16,
                      "max_position_embeddings": 64, "rope_scaling": LONGROPE | {"short_factor": [1.0, 1.1, 1.2],
                                                                             "long_factor": [1.0, 2.0, 3.0]}},
    "olmo2": {"model_type": "olmo2", "rope_theta": 5e5, "num_key_value_heads": 4},
    "granite": {"model_type": "granite", "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
                "residual_multiplier": 0.22, "rope_theta": 1e4},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 4, "rope_theta": 5e6},
    "smollm3 with what is left out": {"model_type": "smollm3"},
    "stablelm": {"model_type": "stablelm", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    "stablelm with what is left out": {"model_type": "stablelm"},
    "cohere2": {"model_type": "cohere2", "sliding_window": 8, "sliding_window_pattern": 3, "rope_theta": 5e4, "logit_scale": 0.25},
    "cohere2 with what is left out": {"model_type": "cohere2"},
}  # fmt: skip


def read(config: dict[str, Any]) -> ModelSpec:
    return family_for(config, "test").read(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_reads_the_same(name: str) -> None:
    config = SIZES | PUBLISHED[name]
    assert read(config) == read(AutoConfig.for_model(**config).to_dict())


@pytest.mark.parametrize("name", PUBLISHED)
def test_writing_changes_no_field(name: str) -> None:
    config = SIZES | PUBLISHED[name]
    written = family_for(config, "test").write(read(config), config)
    assert {word: written[word] for word in config} == config
    assert read(AutoConfig.for_model(**written).to_dict()) == read(config)


def test_what_the_words_mean() -> None:
    def patterns(name: str) -> list[Pattern]:
        return [layer.mixer.pattern for layer in read(SIZES | PUBLISHED[name]).layers]

    assert [isinstance(p, Window) for p in patterns("qwen2, windows")] == [False, False, True, True, True, True]
    assert [isinstance(p, Window) for p in patterns("gemma2")] == [True, False] * 3
    assert [isinstance(p, Window) for p in patterns("gemma3")] == [True, True, False] * 2
    positions = [layer.mixer.position for layer in read(SIZES | PUBLISHED["smollm3"]).layers]
    assert [isinstance(p, NoPosition) for p in positions] == [False, False, False, True, False, False]
    full, local = (read(SIZES | PUBLISHED["gemma3"]).layers[l].mixer.position for l in (2, 0))
    assert isinstance(full, Rope)
    assert isinstance(local, Rope)
    assert (full.theta, full.scaling.name, local.theta, local.scaling.name) == (1e6, "linear", 1e4, "none")


def test_a_changed_rope_is_written_in_the_words_of_the_file() -> None:
    old = SIZES | PUBLISHED["qwen2"]
    spec = read(old | {"rope_theta": 7.0})
    assert family_for(old, "test").write(spec, old)["rope_theta"] == 7.0
    new = SIZES | {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert family_for(new, "test").write(spec, new)["rope_parameters"] == {"rope_type": "default", "rope_theta": 7.0}
    assert "rope_theta" not in family_for(new, "test").write(spec, new)


def test_scalings_in_full() -> None:
    for word in ("longrope", "su"):  # its first name, which transformers 5.24 no longer reads
        rope = read(SIZES | PUBLISHED["phi3"] | {"rope_scaling": LONGROPE | {"type": word}}).layers[0].mixer.position
        assert isinstance(rope, Rope)
        assert isinstance(rope.scaling, LongRope)
        assert (rope.scaling.context, rope.scaling.factor) == (16, 4.0)
    rope = read(SIZES | PUBLISHED["qwen2, yarn"]).layers[0].mixer.position
    assert isinstance(rope, Rope)
    assert rope.scaling == Yarn(factor=4.0, context=8)


ROPES: list[dict[str, Any]] = [
    {"type": "yarn", "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "finetuned": True},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "mscale": None},
    {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6, "original_max_position_embeddings": 8},
    {"type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"type": "mrope", "mrope_section": [1, 2, 1]},
    {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 2, 1], "mrope_interleaved": True, "type": "default"},
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_what_published_files_say_of_rope_is_read(rope: dict[str, Any]) -> None:
    config = SIZES | {"model_type": "llama", "rope_scaling": rope}
    assert family_for(config, "test").write(read(config), config)["rope_scaling"] == rope


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_yarn_of_deepseek_is_kept_as_it_is(model_type: str) -> None:
    """Its mscale_all_dim multiplies the logits, which is in no field."""
    rope = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
            "type": "yarn"}  # fmt: skip
    config = SIZES | {"model_type": model_type, "num_key_value_heads": 4, "rope_scaling": rope, "n_group": 1, "topk_group": 1,
                      "rope_theta": 10000, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
                      "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}  # fmt: skip
    family, spec = family_for(config, "test"), read(config)
    written = family.write(spec, config)
    assert (written["rope_scaling"], written["rope_theta"]) == (rope, 10000)
    faster = override(spec, "layers.*.mixer.position.scaling.factor=20.0")
    assert family.write(faster, config)["rope_scaling"]["factor"] == 20.0
    with pytest.raises(ValueError, match="scale_logits is False where it can only say True"):
        family.write(override(spec, "layers.*.mixer.position.scaling.scale_logits=false"), config)


def test_layers_of_minimax_as_its_own_code_has_them() -> None:
    """attn_type_list: 0 of a lightning layer, 1 of a softmax one."""
    config = SIZES | {"model_type": "minimax", "num_local_experts": 2, "num_experts_per_tok": 1, "attn_type_list": [0, 0, 0, 1, 0, 1]}
    spec = read(config)
    kinds = ["linear_attention" if kind == 0 else "full_attention" for kind in config["attn_type_list"]]
    assert spec == read({**config, "attn_type_list": None, "layer_types": kinds})
    assert [layer.mixer.projection.name for layer in spec.layers][2:4] == ["lightning", "gqa"]
    written = family_for(config, "test").write(spec, config)
    assert (written["layer_types"], written["attn_type_list"]) == (kinds, config["attn_type_list"])
    turned = family_for(config, "test").write(dataclasses.replace(spec, layers=spec.layers[::-1]), config)
    assert turned["attn_type_list"] == [1, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "phi3 has rope type default or longrope"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "fancy"}}, "rope type 'fancy' is not supported; supported: default, linear"),
        ({"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, r"by type of layer \(full_attention\)"),
        ({"model_type": "llama", "rope_scaling": {"factor": 2.0}}, "rope settings have factor, of which rope type default reads none"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "default", "factor": 4.0}}, "rope settings have factor"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0, "alpha": 1.0, "beta_fast": 1}}, "have alpha, beta_fast"),
        (
            {
                "model_type": "llama",
                "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "attention_factor": 2.0},
            },
            "attention_factor, of which rope type llama3 reads factor, h",
        ),
        (
            {"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 4.0, "short_factor": [1.0]}},
            "settings have short_factor",
        ),
        ({"model_type": "minimax", "num_local_experts": 2, "num_experts_per_tok": 1, "attn_type_list": [0, 2]}, "attn_type_list must hold"),
        ({"model_type": "llama", "hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
    ],
)
def test_what_is_not_supported_is_said(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(SIZES | config)
