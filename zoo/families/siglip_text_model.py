"""SigLIP's text encoder."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Head
from zoo.components.head.pooling import Pooling
from zoo.components.registry import part
from zoo.families._decoder import Config, Fields, same
from zoo.families._tower import TextTower
from zoo.family import Family, expect
from zoo.model import ModelSpec
from zoo.weights import Rule

DEFAULTS = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
            "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}  # fmt: skip


@part(Family, "siglip_text_model", source="Zhai et al. 2023, arXiv:2303.15343; transformers SiglipTextModel")
@dataclass(frozen=True, kw_only=True)
class SigLIPText(TextTower):
    """All tokens see all; the last one's vector, projected. It was trained on texts filled with the padding id to the full length."""

    architecture = "SiglipTextModel"
    ignored = r"vision_model\..*|logit_scale|logit_bias|(.*\.)?embeddings\.position_ids"
    defaults = DEFAULTS
    filled = True

    def head(self, config: Config) -> Head:
        return Pooling(pool="last", project=config.get("projection_size") or config["hidden_size"], bias=True)

    def head_fields(self, head: Head, config: Config) -> Fields:
        return {"projection_size": expect(head, Pooling).project}

    def head_rules(self, spec: ModelSpec) -> list[Rule]:
        return same({"head.out": "head"})
