"""SigLIP's image encoder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from zoo.components.contracts import Head
from zoo.components.embed.patches import Patches
from zoo.components.head.attention_pooling import AttentionPooling
from zoo.components.head.hidden import Hidden
from zoo.components.mlp.plain import Plain
from zoo.components.norm.layer import Layer
from zoo.components.registry import part
from zoo.families._decoder import Config, Fields, heads, same
from zoo.families._tower import ImageTower, activation, patches
from zoo.family import Family
from zoo.layouts import split_evenly, viewed
from zoo.model import ModelSpec
from zoo.weights import Rule

DEFAULTS = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3,
            "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
            "vision_use_head": True}  # fmt: skip
MODULES = {
    "head.o": "head.attention.out_proj",
    "head.norm": "head.layernorm",
    "head.mlp.up": "head.mlp.fc1",
    "head.mlp.down": "head.mlp.fc2",
}


@part(Family, "siglip_vision_model", source="Zhai et al. 2023, arXiv:2303.15343; transformers SiglipVisionModel")
@dataclass(frozen=True, kw_only=True)
class SigLIPVision(ImageTower):
    """Patches without a class token; attention pooling makes one vector of them, an encoder without that head gives all of them."""

    architecture = "SiglipVisionModel"
    prefix = "vision_model."
    final_norm = "post_layernorm"
    ignored = r"text_model\..*|logit_scale|logit_bias|(.*\.)?embeddings\.position_ids"
    defaults = DEFAULTS

    def embed(self, config: Config) -> Patches:
        return dataclasses.replace(patches(config, prefix=0), class_token=False)

    def head(self, config: Config) -> Head:
        if not config["vision_use_head"]:
            return Hidden()
        sizes = heads(config)
        mlp = Plain(hidden=config["intermediate_size"], activation=activation(config))
        return AttentionPooling(heads=sizes["heads"], head_dim=sizes["head_dim"], mlp=mlp, norm=Layer(eps=config["layer_norm_eps"]))

    def head_fields(self, head: Head, config: Config) -> Fields:
        return {"vision_use_head": isinstance(head, AttentionPooling)}

    def head_rules(self, spec: ModelSpec) -> list[Rule]:
        fused = [Rule((f"head.attention.in_proj_{leaf}",), tuple(f"head.{n}.{leaf}" for n in "qkv"), split_evenly(3))
                 for leaf in ("weight", "bias")]  # fmt: skip
        return [Rule(("head.probe",), ("head.probe",), viewed((1, 1, spec.width), (spec.width,))), *fused, *same(MODULES)]
