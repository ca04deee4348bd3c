"""Command R7B and Command A."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Head, Norm, Position, Wiring
from zoo.components.head.lm import LMHead
from zoo.components.norm.layer import Layer
from zoo.components.position.none import NoPosition
from zoo.components.registry import part
from zoo.components.wiring.parallel import Parallel
from zoo.families._decoder import SLIDING, Config, Fields, Sliding, heads
from zoo.family import Family, expect
from zoo.model import ModelSpec


@part(Family, "cohere2", source="Command A: arXiv:2504.00698; transformers Cohere2ForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Cohere2(Sliding):
    """Parallel branches on a norm without bias, three windowed layers with rope to one that sees everything and has none."""

    architecture = "Cohere2ForCausalLM"
    defaults = {"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096,
                "max_position_embeddings": 8192}  # fmt: skip
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": False}
    layout = "interleaved"
    period = 4

    def heads(self, config: Config) -> Fields:
        return heads({**config, "head_dim": None})

    def norm(self, config: Config) -> Norm:
        return Layer(eps=config["layer_norm_eps"], bias=False)

    def norm_fields(self, norm: Norm) -> Fields:
        return {"layer_norm_eps": expect(norm, Layer).eps}

    def position(self, config: Config, l: int) -> Position:
        slides = config["layer_types"][l] == SLIDING and config["sliding_window"] is not None
        return super().position(config, l) if slides else NoPosition()

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        turned = any(not isinstance(layer.mixer.position, NoPosition) for layer in spec.layers)
        return super().position_fields(spec, config) if turned else {}

    def wiring(self, config: Config) -> Wiring:
        return Parallel()

    def head(self, config: Config) -> Head:
        return LMHead(tied=config["tie_word_embeddings"], scale=config["logit_scale"])

    def head_fields(self, head: Head) -> Fields:
        return super().head_fields(head) | {"logit_scale": expect(head, LMHead).scale}
