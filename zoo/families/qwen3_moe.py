"""Qwen3-30B-A3B and Qwen3-235B-A22B."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.contracts import Pattern, Projection
from zoo.components.pattern.causal import Causal
from zoo.components.registry import part
from zoo.families._decoder import ATTENTION, GATED, HEAD_NORMS, PRE_NORMS, Config, Fields, window_fields, windowed
from zoo.families._experts import Stepped
from zoo.families.qwen2_moe import MIXTURE
from zoo.family import Family
from zoo.model import ModelSpec


@part(Family, "qwen3_moe", source="Qwen Team 2025, arXiv:2505.09388, section 2; transformers Qwen3MoeForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Stepped):
    """Qwen3, whose queries and keys are normed head by head, with many small experts and no shared one."""

    architecture = "Qwen3MoeForCausalLM"
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": False}
    spelling = {"num_experts": "num_local_experts"}
    defaults = {"num_key_value_heads": 4, "max_position_embeddings": 32768}
    modules = {**ATTENTION, **HEAD_NORMS, **PRE_NORMS, **GATED, **MIXTURE}

    def projection(self, config: Config, l: int) -> Projection:
        return replace(super().projection(config, l), qk_norm=self.norm(config))

    def pattern(self, config: Config, l: int) -> Pattern:
        return windowed({**config, "layer_types": None}, l) if config.get("use_sliding_window") else Causal()

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        window = window_fields(spec)["sliding_window"]
        return {"use_sliding_window": window is not None, "sliding_window": window}
