"""LLaMA 1, 2, 3 and models of its layout (SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zoo.components.embed.tokens import Tokens
from zoo.components.head.lm import LMHead
from zoo.components.mlp.gated import Gated
from zoo.components.norm.rms import RMS
from zoo.components.position.rope import Rope
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.families._rope import read_rope, write_rope
from zoo.family import Family, expect
from zoo.model import LayerSpec, MixerSpec, ModelSpec
from zoo.weights import Rule

ACTIVATION = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu": "relu"}


@part(Family, "llama", source="Touvron et al. 2023, arXiv:2302.13971; Llama 3: arXiv:2407.21783; transformers LlamaForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Llama(Family):
    """Pre-norm decoder with rotary grouped-query attention and a gated MLP."""

    architecture = "LlamaForCausalLM"
    ignored = r".*rotary_emb\.inv_freq"

    def read(self, config: Mapping[str, Any]) -> ModelSpec:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or width // heads
        bias = bool(config.get("attention_bias", False))
        projection = GroupedQuery(
            heads=heads, kv_heads=config.get("num_key_value_heads") or heads, head_dim=head_dim, bias=bias, out_bias=bias
        )
        layer = LayerSpec(
            mixer=MixerSpec(projection=projection, position=read_rope(config, head_dim)),
            mlp=Gated(hidden=config["intermediate_size"], activation=activation(config), bias=bool(config.get("mlp_bias", False))),
            norm=RMS(eps=config.get("rms_norm_eps", 1e-6)),
        )
        return ModelSpec(
            width=width,
            context=config.get("max_position_embeddings", 2048),
            embed=Tokens(vocab=config["vocab_size"]),
            layers=(layer,) * config["num_hidden_layers"],
            norm=layer.norm,
            head=LMHead(tied=bool(config.get("tie_word_embeddings", False))),
            checkpoint=self.name,
        )

    def fields(self, spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        first = spec.layers[0]
        projection, mlp = expect(first.mixer.projection, GroupedQuery), expect(first.mlp, Gated)
        names = {ours: theirs for theirs, ours in reversed(ACTIVATION.items())}
        return {
            "hidden_size": spec.width,
            "intermediate_size": mlp.hidden,
            "num_hidden_layers": len(spec.layers),
            "num_attention_heads": projection.heads,
            "num_key_value_heads": projection.kv_heads,
            "head_dim": projection.head_dim,
            "hidden_act": names.get(mlp.activation, "silu"),
            "max_position_embeddings": spec.context,
            "rms_norm_eps": expect(first.norm, RMS).eps,
            "vocab_size": expect(spec.embed, Tokens).vocab,
            "tie_word_embeddings": expect(spec.head, LMHead).tied,
            "attention_bias": projection.bias,
            "mlp_bias": mlp.bias,
            **write_rope(expect(first.mixer.position, Rope), config, projection.head_dim),
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        layer, ours = "model.layers.{l}.", "layers.{l}."
        attention = {f"self_attn.{n}_proj": f"mixer.projection.{n}" for n in "qkvo"}
        linears = attention | {f"mlp.{n}_proj": f"mlp.{n}" for n in ("gate", "up", "down")}
        return [
            Rule.same("model.embed_tokens.weight", "embed.weight"),
            *(Rule.same(f"{layer}{t}.{leaf}", f"{ours}{o}.{leaf}") for t, o in linears.items() for leaf in ("weight", "bias")),
            Rule.same(f"{layer}input_layernorm.weight", f"{ours}mixer_norm.weight"),
            Rule.same(f"{layer}post_attention_layernorm.weight", f"{ours}mlp_norm.weight"),
            Rule.same("model.norm.weight", "norm.weight"),
            Rule.same("lm_head.weight", "head.out.weight"),
        ]


def activation(config: Mapping[str, Any]) -> Any:
    word = config.get("hidden_act", "silu")
    if word not in ACTIVATION:
        raise ValueError(f"hidden_act {word!r} is not supported; supported: {', '.join(ACTIVATION)}")
    return ACTIVATION[word]
