"""CLIP's text encoder."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Head, Pattern
from zoo.components.head.pooling import Pooling
from zoo.components.pattern.causal import Causal
from zoo.components.registry import part
from zoo.families._decoder import Config, Fields
from zoo.families._tower import TextTower
from zoo.family import Family, expect
from zoo.model import ModelSpec

PROJECTED = "CLIPTextModelWithProjection"
OLD_END = 2  # what published configs say of the end-of-text id, which is the vocabulary's last
DEFAULTS = {"vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "projection_dim": 512, "num_hidden_layers": 12,
            "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
            "eos_token_id": 49407}  # fmt: skip


@part(Family, "clip_text_model", source="Radford et al. 2021, arXiv:2103.00020; transformers CLIPTextModel, ...WithProjection")
@dataclass(frozen=True, kw_only=True)
class CLIPText(TextTower):
    """The vector of the first end-of-text token, projected where the checkpoint has the projection."""

    architecture = "CLIPTextModel"
    ignored = r"vision_model\..*|visual_projection\.weight|logit_scale|(.*\.)?embeddings\.position_ids"
    defaults = DEFAULTS

    def loader(self, spec: ModelSpec) -> str:
        return PROJECTED if self.outer(spec.head) else self.architecture

    def pattern(self, config: Config) -> Pattern:
        return Causal()

    def head(self, config: Config) -> Head:
        projected = PROJECTED in (config.get("architectures") or [])
        end = config["eos_token_id"]
        if not isinstance(end, int):
            raise ValueError(f"eos_token_id {end!r} is not supported: the text's vector is that of one end-of-text token")
        end = config["vocab_size"] - 1 if end == OLD_END else end
        return Pooling(pool="first", only=end, project=config["projection_dim"] if projected else None)

    def head_fields(self, head: Head, config: Config) -> Fields:
        head = expect(head, Pooling)
        same_end = config.get("eos_token_id") == OLD_END and head.only == config.get("vocab_size", 0) - 1
        end = {} if same_end else {"eos_token_id": head.only}
        return end if head.project is None else {**end, "projection_dim": head.project}

    def outer(self, head: Head) -> dict[str, str]:
        return {"head.out": "text_projection"} if isinstance(head, Pooling) and head.project else {}
