"""Granite 3."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.contracts import Embed, Head, Projection, Wiring
from zoo.components.embed.tokens import Tokens
from zoo.components.head.lm import LMHead
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.components.wiring.pre import Pre
from zoo.families._decoder import Config, Decoder, Fields
from zoo.family import Family, expect


@part(Family, "granite", source="Granite 3.0 model card (IBM, 2024), after muP, arXiv:2203.03466; transformers GraniteForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Granite(Decoder):
    """LLaMA with constant factors on embeddings, attention logits, residual branches and output logits."""

    architecture = "GraniteForCausalLM"
    defaults = {"embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}

    def embed(self, config: Config) -> Embed:
        return Tokens(vocab=config["vocab_size"], scale=float(config["embedding_multiplier"]))

    def embed_fields(self, embed: Embed) -> Fields:
        return super().embed_fields(embed) | {"embedding_multiplier": expect(embed, Tokens).scale}

    def projection(self, config: Config, l: int) -> Projection:
        plain, scale = super().projection(config, l), float(config["attention_multiplier"])
        return plain if scale == self.heads(config)["head_dim"] ** -0.5 else replace(plain, logit_scale=scale)

    def projection_fields(self, projection: Projection) -> Fields:
        p = expect(projection, GroupedQuery)
        scale = p.head_dim**-0.5 if p.logit_scale is None else p.logit_scale
        return super().projection_fields(p) | {"attention_multiplier": scale}

    def wiring(self, config: Config) -> Wiring:
        return Pre(scale=float(config["residual_multiplier"]))

    def wiring_fields(self, wiring: Wiring) -> Fields:
        return {"residual_multiplier": expect(wiring, Pre).scale}

    def head(self, config: Config) -> Head:
        return LMHead(tied=bool(config.get("tie_word_embeddings", False)), scale=1.0 / config["logits_scaling"])

    def head_fields(self, head: Head) -> Fields:
        return super().head_fields(head) | {"logits_scaling": 1.0 / expect(head, LMHead).scale}
