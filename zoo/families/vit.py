"""ViT: classifiers and encoders of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from zoo.components.contracts import Head, Projection
from zoo.components.embed.patches import Patches
from zoo.components.head.classification import Classification
from zoo.components.head.pooling import Pooling
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.families._decoder import Config, Fields, heads, same
from zoo.families._tower import ACTIVATIONS, ImageTower, activation_name, is_classifier, label_fields, labels, prefix_tokens
from zoo.family import Family, expect
from zoo.layouts import viewed
from zoo.model import ModelSpec
from zoo.weights import Rule

ATTENTION = {
    "mixer.projection.q": "attention.attention.query",
    "mixer.projection.k": "attention.attention.key",
    "mixer.projection.v": "attention.attention.value",
    "mixer.projection.o": "attention.output.dense",
}
NORMS = {"mixer_norm": "layernorm_before", "mlp_norm": "layernorm_after"}
MODULES = {**ATTENTION, **NORMS, "mlp.up": "intermediate.dense", "mlp.down": "output.dense"}
DEFAULTS = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "hidden_act": "gelu",
            "layer_norm_eps": 1e-12, "image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True,
            "pooler_act": "tanh"}  # fmt: skip


@part(Family, "vit", source="Dosovitskiy et al. 2020, arXiv:2010.11929; transformers ViTForImageClassification, ViTModel")
@dataclass(frozen=True, kw_only=True)
class ViT(ImageTower):
    """A class token before the patches. Classifiers look at it; encoders give their pooler's output.

    encoder: what config.json calls the class without classifier.
    """

    architecture = "ViTForImageClassification"
    encoder: ClassVar[str] = "ViTModel"
    prefix = "vit."
    modules = MODULES
    layers = "encoder.layer"
    final_norm = "layernorm"
    defaults = DEFAULTS
    ignored = r"(.*\.)?embeddings\.mask_token"

    def loader(self, spec: ModelSpec) -> str:
        return self.encoder if isinstance(spec.head, Pooling) else self.architecture

    def projection(self, config: Config) -> Projection:
        return GroupedQuery(**heads(config), bias=config["qkv_bias"], out_bias=True)

    def projection_fields(self, projection: GroupedQuery) -> Fields:
        return {"num_attention_heads": projection.heads, "qkv_bias": projection.bias, "head_dim": projection.head_dim}

    def head(self, config: Config) -> Head:
        if is_classifier(config):
            return Classification(labels=labels(config))
        width = config.get("pooler_output_size") or config["hidden_size"]
        return Pooling(pool="first", project=width, bias=True, activation=ACTIVATIONS[config["pooler_act"]])

    def head_fields(self, head: Head, config: Config) -> Fields:
        if not isinstance(head, Pooling):
            return label_fields(expect(head, Classification).labels, config)
        return {"pooler_output_size": head.project, "pooler_act": activation_name(head.activation, config.get("pooler_act", "tanh"))}

    def outer(self, head: Head) -> dict[str, str]:
        return {} if isinstance(head, Pooling) else {"head.out": "classifier"}

    def head_rules(self, spec: ModelSpec) -> list[Rule]:
        return same({"head.out": "pooler.dense"}) if isinstance(spec.head, Pooling) else []

    def tokens(self, embed: Patches) -> Mapping[str, int]:
        """Names and numbers of the tokens before the patches."""
        return {"cls_token": 1, "register_tokens": embed.registers} if embed.registers else {"cls_token": 1}

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        """Files may hold a pooler that the head does not use."""
        pooled = isinstance(spec.head, Pooling) and spec.head.project
        return super().ignores(name, spec) or (not pooled and name.removeprefix(self.prefix).startswith("pooler."))

    def embed_rules(self, spec: ModelSpec) -> list[Rule]:
        tokens = self.tokens(expect(spec.embed, Patches))
        return [
            Rule(tuple(f"embeddings.{name}" for name in tokens), ("embed.prefix",), prefix_tokens(*tokens.values())),
            Rule(("embeddings.position_embeddings",), ("embed.position.weight",), viewed((1, -1, spec.width), (-1, spec.width))),
            *self.patch_rules(spec, "embeddings.patch_embeddings.projection"),
        ]
