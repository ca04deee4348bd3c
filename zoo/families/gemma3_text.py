"""Gemma 3, text only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zoo.components.contracts import Pattern, Position, Projection
from zoo.components.pattern.full import Full
from zoo.components.pattern.nearby import Nearby
from zoo.components.position.rope import Rope
from zoo.components.registry import part
from zoo.families._decoder import FULL, HEAD_NORMS, SLIDING, Config, Fields, Sliding
from zoo.families._rope import read_rope, write_rope, write_ropes
from zoo.families.gemma2 import Gemma2
from zoo.family import Family, expect
from zoo.model import ModelSpec


@part(Family, "gemma3_text", source="Gemma 3: arXiv:2503.19786; transformers Gemma3ForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Gemma3Text(Gemma2):
    """Gemma 2 with norms on q and k in place of the caps, five windowed layers to a full one, and a rope for each kind."""

    architecture = "Gemma3ForCausalLM"
    # the sizes too: files with a vision tower leave out what equals transformers' own
    defaults = {**Gemma2.defaults, "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                "num_attention_heads": 8, "num_key_value_heads": 4, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                "max_position_embeddings": 131072, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}  # fmt: skip
    modules = {**Gemma2.modules, **HEAD_NORMS}
    period = 6

    def settled(self, config: Config) -> Config:
        if config.get("attn_logit_softcapping") is not None:
            raise ValueError("attn_logit_softcapping is not supported in gemma3_text: no published model has it and transformers skips it")
        return Sliding.settled(self, config)

    def pattern(self, config: Config, l: int) -> Pattern:
        if not config.get("use_bidirectional_attention"):
            return super().pattern(config, l)
        return Nearby(reach=config["sliding_window"] // 2) if config["layer_types"][l] == SLIDING else Full()

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        near = [layer.mixer.pattern for layer in spec.layers if isinstance(layer.mixer.pattern, Nearby)]
        both = bool(near) or isinstance(spec.layers[-1].mixer.pattern, Full)
        if not both:
            return super().pattern_fields(spec, config) | {"use_bidirectional_attention": False}
        types = [SLIDING if isinstance(layer.mixer.pattern, Nearby) else FULL for layer in spec.layers]
        window = {"sliding_window": 2 * near[0].reach} if near else {}
        return {"use_bidirectional_attention": True, "layer_types": types, **window}

    def projection(self, config: Config, l: int) -> Projection:
        return replace(super().projection(config, l), qk_norm=self.norm(config))

    def position(self, config: Config, l: int) -> Position:
        kind, width = config["layer_types"][l], self.heads(config)["head_dim"]
        if kind == FULL:
            return read_rope(config, width, kind)
        alone = {"rope_parameters": config.get("rope_parameters"), "rope_theta": config["rope_local_base_freq"]}
        return read_rope(alone | {"max_position_embeddings": config["max_position_embeddings"]}, width, kind)

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        width = spec.layers[0].mixer.projection.rotary_width
        positions = zip(self.pattern_fields(spec, config)["layer_types"], (layer.mixer.position for layer in spec.layers), strict=True)
        ropes = {kind: expect(position, Rope) for kind, position in positions}
        if config.get("rope_parameters"):
            return write_ropes(ropes, config, width, spec.context)
        whole = write_rope(ropes[FULL], config, width, spec.context) if FULL in ropes else {}
        return whole | ({"rope_local_base_freq": ropes[SLIDING].theta} if SLIDING in ropes else {})

    def write(self, spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        """As Family.write; over its text part where the model came from a checkpoint with a vision tower."""
        return super().write(spec, config.get("text_config", config))
