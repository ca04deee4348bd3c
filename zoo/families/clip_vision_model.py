"""CLIP's image encoder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from zoo.components.contracts import Head
from zoo.components.embed.patches import Patches
from zoo.components.head.pooling import Pooling
from zoo.components.norm.layer import Layer
from zoo.components.registry import part
from zoo.families._decoder import Config, Fields, same
from zoo.families._tower import ImageTower, patches
from zoo.family import Family, expect
from zoo.layouts import viewed
from zoo.model import ModelSpec
from zoo.weights import Rule

PROJECTED = "CLIPVisionModelWithProjection"
DEFAULTS = {"hidden_size": 768, "intermediate_size": 3072, "projection_dim": 512, "num_hidden_layers": 12, "num_attention_heads": 12,
            "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}  # fmt: skip


@part(Family, "clip_vision_model", source="Radford et al. 2021, arXiv:2103.00020; transformers CLIPVisionModel, ...WithProjection")
@dataclass(frozen=True, kw_only=True)
class CLIPVision(ImageTower):
    """The class token's vector, taken into the space that images and texts share where the checkpoint has that projection."""

    architecture = "CLIPVisionModel"
    prefix = "vision_model."
    final_norm = "post_layernorm"
    ignored = r"text_model\..*|text_projection\.weight|logit_scale|(.*\.)?embeddings\.position_ids"
    defaults = DEFAULTS

    def loader(self, spec: ModelSpec) -> str:
        return PROJECTED if self.outer(spec.head) else self.architecture

    def embed(self, config: Config) -> Patches:
        return dataclasses.replace(patches(config), bias=False, norm=Layer(eps=config["layer_norm_eps"]))

    def head(self, config: Config) -> Head:
        return Pooling(pool="first", project=config["projection_dim"] if PROJECTED in (config.get("architectures") or []) else None)

    def head_fields(self, head: Head, config: Config) -> Fields:
        project = expect(head, Pooling).project
        return {} if project is None else {"projection_dim": project}

    def outer(self, head: Head) -> dict[str, str]:
        return {"head.out": "visual_projection"} if isinstance(head, Pooling) and head.project else {}

    def embed_rules(self, spec: ModelSpec) -> list[Rule]:
        token = Rule(("embeddings.class_embedding",), ("embed.prefix",), viewed((spec.width,), (1, spec.width)))
        return [token, *super().embed_rules(spec), *same({"embed.norm": "pre_layrnorm"})]
