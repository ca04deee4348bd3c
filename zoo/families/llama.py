"""LLaMA 1, 2, 3 and models of its layout (SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zoo.components.contracts import Kernel, Linear
from zoo.components.embed.tokens import Tokens
from zoo.components.head.lm import LMHead
from zoo.components.kernel.sdpa import SDPA
from zoo.components.linear.dense import Dense
from zoo.components.mlp.gated import Gated
from zoo.components.norm.rms import RMS
from zoo.components.pattern.causal import Causal
from zoo.components.position.rope import Rope
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.components.spec import transform
from zoo.components.wiring.pre import Pre
from zoo.families._rope import read_rope, write_rope
from zoo.family import Family
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
        projection = GroupedQuery(heads=heads, kv_heads=config.get("num_key_value_heads") or heads, head_dim=head_dim, bias=bias, out_bias=bias)
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

    def write(self, spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        first = uniform_layer(spec, self.name)
        projection, mlp, position = first.mixer.projection, first.mlp, first.mixer.position
        assert isinstance(projection, GroupedQuery) and isinstance(mlp, Gated) and isinstance(position, Rope)
        assert isinstance(first.norm, RMS) and isinstance(spec.embed, Tokens) and isinstance(spec.head, LMHead)
        names = {ours: theirs for theirs, ours in reversed(ACTIVATION.items())}
        return {
            **config,
            "architectures": [self.architecture],
            "model_type": self.name,
            "hidden_size": spec.width,
            "intermediate_size": mlp.hidden,
            "num_hidden_layers": len(spec.layers),
            "num_attention_heads": projection.heads,
            "num_key_value_heads": projection.kv_heads,
            "head_dim": projection.head_dim,
            "hidden_act": names[mlp.activation],
            "max_position_embeddings": spec.context,
            "rms_norm_eps": first.norm.eps,
            "vocab_size": spec.embed.vocab,
            "tie_word_embeddings": spec.head.tied,
            "attention_bias": projection.bias,
            "mlp_bias": mlp.bias,
            **write_rope(position, config, projection.head_dim),
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        layer, ours = "model.layers.{l}.", "layers.{l}."
        linears = {"self_attn.q_proj": "mixer.projection.q", "self_attn.k_proj": "mixer.projection.k", "self_attn.v_proj": "mixer.projection.v",
                   "self_attn.o_proj": "mixer.projection.o", "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}  # fmt: skip
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


def uniform_layer(spec: ModelSpec, family: str) -> LayerSpec:
    """The one layer that all layers equal in what a llama config can say. Raises ValueError listing what it cannot say."""
    wrong = [f"layers.{i}.{place} is {have}, not {want}" for i, layer in enumerate(spec.layers) for place, have, want in _limits(layer)]
    bare = [transform(layer, _bare) for layer in spec.layers]
    wrong += [f"layers.{i} differs from layers.0" for i, layer in enumerate(bare) if layer != bare[0] and not wrong]
    if spec.head != LMHead(tied=spec.head.tie() is not None, out=getattr(spec.head, "out", None)):
        wrong.append("head is not a bias-free lm head")
    if spec.embed != Tokens(vocab=getattr(spec.embed, "vocab", 0)):
        wrong.append("embed is not a plain token embedding")
    if spec.norm != spec.layers[0].norm:
        wrong.append("the final norm differs from the layers' norms")
    if wrong:
        raise ValueError(f"a {family} config cannot say this: {'; '.join(wrong[:8])}{'; ...' if len(wrong) > 8 else ''}")
    return bare[0]


def _bare(spec: Any) -> Any:
    """Storage and kernel are no part of the architecture."""
    if isinstance(spec, Linear):
        return Dense()
    return SDPA() if isinstance(spec, Kernel) else spec


def _limits(layer: LayerSpec) -> list[tuple[str, object, object]]:
    """(place, what it is, what a llama has) for each part that differs."""
    mixer, norm = layer.mixer, layer.norm
    expected = [
        ("wiring", layer.wiring.name, Pre.name),
        ("norm", norm if isinstance(norm, RMS) and norm != RMS(eps=norm.eps) else norm.name, RMS.name),
        ("mlp", layer.mlp.name, Gated.name),
        ("mlp.activation", getattr(layer.mlp, "activation", "silu") in ACTIVATION.values(), True),
        ("mixer.projection", mixer.projection.name, GroupedQuery.name),
        ("mixer.position", mixer.position.name, Rope.name),
        ("mixer.position.layout", getattr(mixer.position, "layout", "half"), "half"),
        ("mixer.pattern", mixer.pattern.name, Causal.name),
        ("mixer.projection.qk_norm", getattr(mixer.projection, "qk_norm", None), None),
        ("mixer.projection.logit_scale", getattr(mixer.projection, "logit_scale", None), None),
        ("mixer.projection.out_bias", getattr(mixer.projection, "out_bias", None), getattr(mixer.projection, "bias", None)),
    ]
    return [row for row in expected if row[1] != row[2]]
