"""Llama 4 with its vision model, of which the language model is read."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.registry import part
from zoo.families._decoder import Config
from zoo.families.llama4_text import Llama4Text
from zoo.family import Family
from zoo.model import ModelSpec


@part(Family, "llama4", source="Meta 2025, ai.meta.com/blog/llama-4-multimodal-intelligence; transformers Llama4ForConditionalGeneration")
@dataclass(frozen=True, kw_only=True)
class Llama4(Llama4Text):
    """The language model alone: it is saved as ``llama4_text``, which transformers loads without the vision model."""

    architecture = "Llama4ForConditionalGeneration"
    prefix = "language_model.model."
    out = "language_model.lm_head"
    left_out = r"(vision_model|multi_modal_projector)\..*"

    def read(self, config: Config) -> ModelSpec:
        return Llama4Text().read({"tie_word_embeddings": config.get("tie_word_embeddings", False), **config["text_config"]})
