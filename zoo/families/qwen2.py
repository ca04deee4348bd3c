"""Qwen 2 and 2.5."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.registry import part
from zoo.families._decoder import FULL, SLIDING, Config, Fields, Sliding
from zoo.family import Family
from zoo.model import ModelSpec


@part(Family, "qwen2", source="Qwen2: arXiv:2407.10671; Qwen2.5: arXiv:2412.15115; transformers Qwen2ForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Qwen2(Sliding):
    """LLaMA with biases on q, k and v, and a window in the layers from ``max_window_layers`` on where it is switched on."""

    architecture = "Qwen2ForCausalLM"
    defaults = {"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "sliding_window": 4096,
                "max_window_layers": 28}  # fmt: skip
    biases = {"qkv": True, "out": False, "mlp": False}

    def settled(self, config: Config) -> Config:
        config = super().settled(config)
        return config if config.get("use_sliding_window") else {**config, "sliding_window": None}

    def layer_types(self, config: Config) -> list[str]:
        slides = config.get("use_sliding_window") and config["sliding_window"] is not None
        return [SLIDING if slides and l >= config["max_window_layers"] else FULL for l in range(config["num_hidden_layers"])]

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        found = super().pattern_fields(spec, config)
        return found | {"use_sliding_window": "sliding_window" in found}
