"""Families with mixtures of experts against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import zoo
from tests.zoo.families.harness import BASE, CHECKS, TOLERANCE, Case, ids, randomized, slow
from tests.zoo.oracle import relative_error
from zoo.components import registry
from zoo.components.spec import override
from zoo.saving import describe

hf: Any = transformers  # its configs take fields that their signatures do not name
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTRAL = {"num_local_experts": 4}
QWEN2 = FEW | {"shared_expert_intermediate_size": 20}
OLMOE = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": None}
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": None,
          "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
          "first_k_dense_replace": 1}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 0.8, "mscale_all_dim": 1.2}  # fmt: skip
V3 = LATENT | {"n_group": 4, "topk_group": 2}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
LLAMA4 = {"num_local_experts": 4, "intermediate_size_mlp": 40, "attention_chunk_size": 8, "num_hidden_layers": 4, "floor_scale": 4}

CASES = [
    Case("mixtral", "MixtralForCausalLM", MIXTRAL),
    slow(Case("mixtral, window", "MixtralForCausalLM", MIXTRAL | {"sliding_window": 8, "num_experts_per_tok": 1})),
    Case("qwen2_moe", "Qwen2MoeForCausalLM", QWEN2 | {"mlp_only_layers": [0]}),
    slow(Case("qwen2_moe, window", "Qwen2MoeForCausalLM", QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 3,
         "decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True})),
    Case("qwen3_moe", "Qwen3MoeForCausalLM", FEW | {"norm_topk_prob": True, "head_dim": 24}),
    slow(Case("qwen3_moe, options", "Qwen3MoeForCausalLM", FEW | {"attention_bias": True, "mlp_only_layers": [1],
         "use_sliding_window": True, "sliding_window": 8})),
    Case("olmoe", "OlmoeForCausalLM", OLMOE),
    slow(Case("olmoe, clipped", "OlmoeForCausalLM", OLMOE | {"clip_qkv": 0.7, "norm_topk_prob": True, "attention_bias": True})),
    Case("deepseek_v2, lite", "DeepseekV2ForCausalLM", LATENT | {"q_lora_rank": None, "rope_parameters": YARN}),
    slow(Case("deepseek_v2, groups", "DeepseekV2ForCausalLM", LATENT | {"topk_method": "group_limited_greedy", "n_group": 4,
         "topk_group": 2, "routed_scaling_factor": 16.0, "mlp_bias": True, "attention_bias": True})),
    Case("deepseek_v3", "DeepseekV3ForCausalLM", V3 | {"rope_parameters": YARN}),
    slow(Case("deepseek_v3, options", "DeepseekV3ForCausalLM", V3 | {"rope_interleave": False, "attention_bias": True, "q_lora_rank": None,
         "norm_topk_prob": False, "n_shared_experts": 2, "first_k_dense_replace": 0})),
    Case("gpt_oss", "GptOssForCausalLM", OSS),
    slow(Case("gpt_oss, options", "GptOssForCausalLM", OSS | {"attention_bias": False, "swiglu_limit": 0.5, "swiglu_alpha": 1.2,
         "layer_types": ["full_attention", "full_attention"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})),
    Case("llama4_text", "Llama4ForCausalLM", LLAMA4 | {"interleave_moe_layer_step": 2}),
    slow(Case("llama4_text, options", "Llama4ForCausalLM", LLAMA4 | {"use_qk_norm": False, "attn_temperature_tuning": False,
         "num_experts_per_tok": 2, "attention_bias": True, "no_rope_layers": [1, 0, 1, 0], "moe_layers": [0, 1],
         "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                             "original_max_position_embeddings": 8}})),
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case, check: str, written: Callable[[Case], tuple[Path, Any]]) -> None:
    CHECKS[check](case, *written(case))


STACKED = [case for case in CASES if isinstance(case, Case) and case.name.split(",")[0] not in ("gpt_oss", "llama4_text")]


@pytest.mark.parametrize("case", STACKED, ids=lambda case: case.name)
@torch.no_grad()
def test_stacked_experts_load_the_same(case: Case, written: Callable[[Case], tuple[Path, Any]], tmp_path: Path) -> None:
    """transformers 5 can also write what it computes with, one tensor for all experts of a layer."""
    folder, theirs = written(case)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    assert not any("experts.0." in name or "block_sparse_moe" in name for name in names)
    assert zoo.spec(tmp_path) == zoo.spec(folder)
    assert torch.equal(zoo.load(tmp_path)(ids(2)), zoo.load(folder)(ids(2)))


@torch.no_grad()
def test_llama4_without_its_vision_model(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "vision_output_dim": 32,
              "image_size": 28, "patch_size": 14, "projector_input_dim": 32, "projector_output_dim": 32}  # fmt: skip
    config = hf.Llama4Config(text_config=hf.Llama4TextConfig(**BASE | LLAMA4), vision_config=hf.Llama4VisionConfig(**vision))
    config._attn_implementation = "eager"
    theirs: Any = randomized(hf.Llama4ForConditionalGeneration(config))
    theirs.save_pretrained(tmp_path / "whole")
    ours, want = zoo.load(tmp_path / "whole"), theirs.language_model(ids(2)).logits  # the whole fails without an image
    assert relative_error(ours(ids(2)), want) < TOLERANCE
    assert zoo.save(ours, tmp_path / "text").transformers is None
    back = hf.Llama4ForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager")
    assert relative_error(back(ids(2)).logits, want) < TOLERANCE
    assert zoo.spec(tmp_path / "text") == zoo.spec(tmp_path / "whole")


@pytest.mark.parametrize("dispatch", ["loop", "grouped", "{name: offload, resident: 1}", "{name: capacity, factor: null}", "capacity"])
def test_how_experts_are_run_is_no_part_of_a_checkpoint(dispatch: str) -> None:
    """A dispatch that runs every choice is left out of config.json; one that drops some is a model that the family cannot say."""
    family, config = registry.get("family", "mixtral").spec(), hf.MixtralConfig(**MIXTRAL | BASE).to_dict()
    spec = override(family.read(config), f"layers.*.mlp.dispatch={dispatch}")  # pyright: ignore[reportAttributeAccessIssue]
    written, reason = describe(spec, config, family, None)  # pyright: ignore[reportArgumentType]
    assert (written["model_type"], reason is None) == (("zoo", False) if dispatch == "capacity" else ("mixtral", True))


def test_every_exact_dispatch_may_stand_in() -> None:
    exact = {part.name for part in registry.parts("experts") if part.small().exact}  # pyright: ignore[reportAttributeAccessIssue]
    assert exact == {"grouped", "loop", "offload"}
