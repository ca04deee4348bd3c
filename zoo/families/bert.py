"""BERT and the many encoders of its layout (MiniLM, E5, BGE, GTE)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.contracts import Embed, Position, Wiring
from zoo.components.embed.segments import Segments
from zoo.components.head.classification import Classification
from zoo.components.head.hidden import Hidden
from zoo.components.head.masked_lm import MaskedLM
from zoo.components.norm.identity import Identity
from zoo.components.position.none import NoPosition
from zoo.components.position_embedding.learned import Learned
from zoo.components.registry import part
from zoo.components.wiring.post import Post
from zoo.families._classic import refuse
from zoo.families._decoder import Config, Fields, activation
from zoo.families._encoder import Encoder
from zoo.families._tower import labels
from zoo.family import Family, expect
from zoo.model import ModelSpec

EMBEDDINGS = {"embed.segment": "embeddings.token_type_embeddings.weight", "embed.position": "embeddings.position_embeddings",
              "embed.norm": "embeddings.LayerNorm"}  # fmt: skip
LAYER = {
    **{f"mixer.projection.{n}": f"attention.self.{word}" for n, word in (("q", "query"), ("k", "key"), ("v", "value"))},
    "mixer.projection.o": "attention.output.dense",
    "mixer_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


@part(Family, "bert", source="Devlin et al. 2018, arXiv:1810.04805; transformers BertModel, BertForMaskedLM, BertForSequenceClassification")
@dataclass(frozen=True, kw_only=True)
class Bert(Encoder):
    """Post-norm encoder with learned positions and segments.

    Of a model that was pre-trained on two tasks the masked tokens are read, not the next sentence.
    """

    architecture, stem, prefix = "BertModel", "Bert", "bert."
    ignored = r"(.*\.)?embeddings\.(position|token_type)_ids|cls\.predictions\.(decoder\.)?bias"
    layers, table, beside = "encoder.layer", "embeddings.word_embeddings", EMBEDDINGS
    modules, fused = LAYER, ""
    defaults = {"hidden_act": "gelu", "tie_word_embeddings": True, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
                "max_position_embeddings": 512, "intermediate_size": 3072}  # fmt: skip
    tables = {
        "masked_lm": {"head.hidden": "cls.predictions.transform.dense", "head.norm": "cls.predictions.transform.LayerNorm",
                      "head.out.weight": "cls.predictions.decoder.weight", "head.out.bias": "cls.predictions.bias"},
        "classification": {"head.hidden": "bert.pooler.dense", "head.out": "classifier"},
        "hidden": {"head.out": "bert.pooler.dense"},
        "pooling": {"head.out": "bert.pooler.dense"},
    }  # fmt: skip
    unread = ("cls.predictions", "cls.seq_relationship", "classifier", "bert.pooler")

    def read(self, config: Config) -> ModelSpec:
        return replace(super().read(config), norm=Identity())

    def settled(self, config: Config) -> Config:
        config = super().settled(config)
        refuse(config, position_embedding_type="absolute")
        return config

    def embed(self, config: Config) -> Embed:
        return Segments(
            vocab=config["vocab_size"], segments=config["type_vocab_size"], position=self.places(config), norm=self.norm(config)
        )

    def places(self, config: Config) -> Learned:
        return Learned(count=config["max_position_embeddings"])

    def embed_fields(self, embed: Embed) -> Fields:
        embed = expect(embed, Segments)
        return {"vocab_size": embed.vocab, "type_vocab_size": embed.segments, **self.place_fields(expect(embed.position, Learned))}

    def place_fields(self, position: Learned) -> Fields:
        return {"max_position_embeddings": position.count}

    def position(self, config: Config, l: int) -> Position:
        return NoPosition()

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        return {}

    def wiring(self, config: Config) -> Wiring:
        return Post()

    def head_table(self, spec: ModelSpec) -> dict[str, str]:
        """An output with a weight of its own has its bias beside it; the other bias is then a copy that nothing reads."""
        table = super().head_table(spec)
        if isinstance(spec.head, MaskedLM) and not spec.head.tied:
            table["head.out.bias"] = table["head.out.weight"].removesuffix("weight") + "bias"
        return table

    def masked_lm(self, config: Config) -> MaskedLM:
        return MaskedLM(tied=config["tie_word_embeddings"], activation=activation(config), norm=self.norm(config))

    def classification(self, config: Config) -> Classification:
        return Classification(labels=labels(config), dense="tanh")

    def hidden(self, config: Config) -> Hidden:
        return Hidden(pooler="tanh")
