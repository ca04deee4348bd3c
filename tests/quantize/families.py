"""Tiny random models of checkpoint families, for tests of what concerns the parts of each."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.zoo.oracle import randomize
from zoo.family import family_for
from zoo.model import Model

BASE: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 2,
                        "pad_token_id": 0}  # fmt: skip
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": None,
       "num_key_value_heads": 4}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", {}),
    "cohere2": ("Cohere2", {}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 24}),
    "opt_relu": ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 24, "activation_function": "relu"}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 4, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]} | EXPERTS),
    "deepseek_v2": ("DeepseekV2", {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1} | MLA | EXPERTS),
    "deepseek_v3": ("DeepseekV3", {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
                                   "topk_group": 1} | MLA | EXPERTS),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "sliding_window": 8, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2", {}),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2}),
    "qwen3_next": ("Qwen3Next", {"num_experts": 4, "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4,
                                 "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                                 "layer_types": ["linear_attention", "full_attention"]} | EXPERTS),
}  # fmt: skip


def family_model(name: str, seed: int = 0) -> Model:
    """A model of the family with every parameter random, in float64 (norms compute in float32 all the same)."""
    kind, options = CONFIGS[name]
    given = {k: v for k, v in (BASE | options).items() if v is not None}
    config = getattr(transformers, f"{kind}Config")(**given).to_dict()
    model = family_for(config, name).read(config).build()
    randomize(model, seed)
    return model.double().requires_grad_(False)


def tokens(rows: int = 3, length: int = 20, seed: int = 1) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(seed))
