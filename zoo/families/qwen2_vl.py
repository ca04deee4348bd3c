"""Qwen 2 VL, of which the language model is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from zoo.components.contracts import Position
from zoo.components.registry import part
from zoo.families._decoder import Config, Fields, heads
from zoo.families._rope import read_rope, settings
from zoo.families.qwen2 import Qwen2
from zoo.family import Family
from zoo.model import ModelSpec


@part(Family, "qwen2_vl", source="Qwen2-VL: arXiv:2409.12191; transformers Qwen2VLForConditionalGeneration")
@dataclass(frozen=True, kw_only=True)
class Qwen2VL(Qwen2):
    """Qwen 2 whose rope turns by time, row and column (``Step.axes``); plain text is turned by its positions."""

    architecture = "Qwen2VLForConditionalGeneration"
    defaults = {**Qwen2.defaults, "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
                "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
                "max_window_layers": 80}  # fmt: skip
    left_out = r"visual\..*"

    def settled(self, config: Config) -> Config:
        tied = config.get("tie_word_embeddings", False)  # published files have all fields at the top, newer ones in text_config
        return super().settled({"tie_word_embeddings": tied, **config.get("text_config", config)})

    def heads(self, config: Config) -> Fields:
        return heads({**config, "head_dim": None})

    def position(self, config: Config, l: int) -> Position:
        data = {"mrope_section": [16, 24, 24], **settings(config)}
        return read_rope({**config, "rope_scaling": data}, self.heads(config)["head_dim"])

    def known_as(self, names: Collection[str], spec: ModelSpec) -> dict[str, str]:
        """Some files have the names of the modules: ``model.language_model`` and ``model.visual``."""
        return {n: n.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1) for n in names}

    def write(self, spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ValueError always: transformers has no class for this language model without the vision tower."""
        raise ValueError("only the language model of qwen2_vl was read, which transformers does not load without the vision tower")
