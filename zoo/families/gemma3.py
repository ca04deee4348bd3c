"""Gemma 3 with a vision tower, of which the language model is read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from zoo.components.registry import part
from zoo.families._decoder import Config
from zoo.families.gemma3_text import Gemma3Text
from zoo.family import Family
from zoo.model import ModelSpec


@part(Family, "gemma3", source="Gemma 3: arXiv:2503.19786; transformers Gemma3ForConditionalGeneration")
@dataclass(frozen=True, kw_only=True)
class Gemma3(Gemma3Text):
    """The language model alone: it is saved as ``gemma3_text``, which transformers loads without the tower."""

    architecture = "Gemma3ForConditionalGeneration"
    prefix = "language_model.model."
    out = "language_model.lm_head"
    left_out = r"(vision_tower|multi_modal_projector)\..*"

    def read(self, config: Config) -> ModelSpec:
        tied = config.get("tie_word_embeddings", True)
        return Gemma3Text().read({"tie_word_embeddings": tied, **config["text_config"]})

    def known_as(self, names: Collection[str], spec: ModelSpec) -> dict[str, str]:
        """Some files have the names of the modules: ``model.language_model`` and ``model.vision_tower``, with the head outside."""
        out = {f"lm_head.{leaf}": f"{self.out}.{leaf}" for leaf in ("weight", "bias")}
        return {n: out.get(n) or n.replace("model.language_model.", f"model.{self.prefix}", 1).removeprefix("model.") for n in names}
