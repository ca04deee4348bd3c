"""Mistral 7B and models of its layout."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Pattern
from zoo.components.registry import part
from zoo.families._decoder import Config, Decoder, Fields, window_fields, windowed
from zoo.family import Family
from zoo.model import ModelSpec


@part(Family, "mistral", source="Jiang et al. 2023, arXiv:2310.06825; transformers MistralForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Mistral(Decoder):
    """LLaMA with a sliding window in every layer."""

    architecture = "MistralForCausalLM"
    defaults = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}
    biases = {"qkv": False, "out": False, "mlp": False}

    def pattern(self, config: Config, l: int) -> Pattern:
        return windowed(config, l)

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        return {"sliding_window": window_fields(spec)["sliding_window"]}
