"""SmolLM 3."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Position
from zoo.components.position.none import NoPosition
from zoo.components.registry import part
from zoo.families._decoder import FULL, SLIDING, Config, Fields, Sliding
from zoo.family import Family
from zoo.model import ModelSpec


@part(Family, "smollm3", source="SmolLM3 (Hugging Face, 2025), after NoPE, arXiv:2501.18795; transformers SmolLM3ForCausalLM")
@dataclass(frozen=True, kw_only=True)
class SmolLM3(Sliding):
    """LLaMA without rope in every fourth layer, which may have a window instead."""

    architecture = "SmolLM3ForCausalLM"
    defaults = {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0, "max_position_embeddings": 32768,
                "no_rope_layer_interval": 4}  # fmt: skip

    def settled(self, config: Config) -> Config:
        turned = config.get("no_rope_layers") or self.turned({**self.defaults, **config})
        return super().settled({**config, "no_rope_layers": turned})

    def turned(self, config: Config) -> list[int]:
        """1 for each layer with rope: ``no_rope_layers`` says the opposite of its name."""
        return [int((l + 1) % config["no_rope_layer_interval"] != 0) for l in range(config["num_hidden_layers"])]

    def layer_types(self, config: Config) -> list[str]:
        slides = config.get("use_sliding_window") and config.get("sliding_window") is not None
        return [SLIDING if slides and not config["no_rope_layers"][l] else FULL for l in range(config["num_hidden_layers"])]

    def position(self, config: Config, l: int) -> Position:
        return super().position(config, l) if config["no_rope_layers"][l] else NoPosition()

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        turned = [int(not isinstance(layer.mixer.position, NoPosition)) for layer in spec.layers]
        return {"no_rope_layers": turned} | (super().position_fields(spec, config) if any(turned) else {})

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        found = super().pattern_fields(spec, config)
        return found | {"use_sliding_window": "sliding_window" in found}
