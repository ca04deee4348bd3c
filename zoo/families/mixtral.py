"""Mixtral 8x7B and 8x22B."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Pattern
from zoo.components.registry import part
from zoo.families._decoder import ATTENTION, PRE_NORMS, Config, Fields, window_fields, windowed
from zoo.families._experts import Mixture, gated
from zoo.family import Family
from zoo.model import ModelSpec


@part(Family, "mixtral", source="Jiang et al. 2024, arXiv:2401.04088; transformers MixtralForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Mixtral(Mixture):
    """Mistral with a mixture of experts in every layer, of which each token takes two."""

    architecture = "MixtralForCausalLM"
    block = "block_sparse_moe"
    expert_key = "intermediate_size"
    spelling = {"num_experts": "num_local_experts"}
    defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 4096 * 32}
    modules = {
        **ATTENTION,
        **PRE_NORMS,
        "mlp.router": "block_sparse_moe.gate",
        **gated("mlp.experts.{e}", "block_sparse_moe.experts.{e}", ("w1", "w3", "w2")),
    }

    def pattern(self, config: Config, l: int) -> Pattern:
        return windowed(config, l)

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        return {"sliding_window": window_fields(spec)["sliding_window"]}
