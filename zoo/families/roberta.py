"""RoBERTa."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.head.masked_lm import MaskedLM
from zoo.components.position_embedding.learned import Learned
from zoo.components.registry import part
from zoo.families._decoder import Config, Fields
from zoo.families.bert import Bert
from zoo.family import Family
from zoo.model import ModelSpec


@part(Family, "roberta", source="Liu et al. 2019, arXiv:1907.11692; transformers RobertaModel and its task classes")
@dataclass(frozen=True, kw_only=True)
class Roberta(Bert):
    """BERT whose table of positions has rows up to the padding token's id before that of the first position."""

    architecture, stem, prefix = "RobertaModel", "Roberta", "roberta."
    ignored = r"(.*\.)?embeddings\.(position|token_type)_ids|lm_head\.(decoder\.)?bias"
    defaults = {**Bert.defaults, "pad_token_id": 1}
    tables = {
        "masked_lm": {"head.hidden": "lm_head.dense", "head.norm": "lm_head.layer_norm", "head.out.weight": "lm_head.decoder.weight",
                      "head.out.bias": "lm_head.bias"},
        "classification": {"head.hidden": "classifier.dense", "head.out": "classifier.out_proj"},
        "hidden": {"head.out": "roberta.pooler.dense"},
        "pooling": {"head.out": "roberta.pooler.dense"},
    }  # fmt: skip
    unread = ("lm_head", "classifier", "roberta.pooler")

    def read(self, config: Config) -> ModelSpec:
        return replace(super().read(config), context=self.places(self.settled(config)).count)

    def places(self, config: Config) -> Learned:
        offset = config["pad_token_id"] + 1
        return Learned(count=config["max_position_embeddings"] - offset, offset=offset)

    def place_fields(self, position: Learned) -> Fields:
        return {"max_position_embeddings": position.count + position.offset, "pad_token_id": position.offset - 1}

    def masked_lm(self, config: Config) -> MaskedLM:
        return replace(super().masked_lm(config), activation="gelu")
