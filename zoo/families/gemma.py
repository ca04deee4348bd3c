"""Gemma 1."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Embed, Norm
from zoo.components.embed.tokens import Tokens
from zoo.components.norm.rms import RMS
from zoo.components.registry import part
from zoo.families._decoder import Config, Decoder
from zoo.family import Family


def gemma_norm(config: Config) -> RMS:
    """1 + weight, applied before the result returns to the input's dtype."""
    return RMS(eps=config["rms_norm_eps"], offset=1.0, cast="after_weight")


def gemma_embed(config: Config) -> Tokens:
    """Embeddings times sqrt(width)."""
    return Tokens(vocab=config["vocab_size"], scale=config["hidden_size"] ** 0.5)


@part(Family, "gemma", source="Gemma: arXiv:2403.08295; transformers GemmaForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Gemma(Decoder):
    """Scaled embeddings, norms with 1 + weight, GeGLU."""

    architecture = "GemmaForCausalLM"
    defaults = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "num_key_value_heads": 16, "head_dim": 256,
                "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192}  # fmt: skip
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": False}

    def settled(self, config: Config) -> Config:
        if config.get("use_bidirectional_attention"):
            raise ValueError("use_bidirectional_attention is not supported in gemma: transformers' own kernels differ in what it means")
        config = super().settled(config)  # the first files say gelu, and were trained with its tanh approximation
        return {**config, "hidden_act": "gelu_pytorch_tanh"} if config["hidden_act"] == "gelu" else config

    def embed(self, config: Config) -> Embed:
        return gemma_embed(config)

    def norm(self, config: Config) -> Norm:
        return gemma_norm(config)
