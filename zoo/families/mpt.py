"""MPT."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.contracts import MLP, Position, Projection
from zoo.components.mlp.plain import Plain
from zoo.components.position.alibi import ALiBi
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.families._classic import Classic, refuse
from zoo.families._decoder import Config, Fields
from zoo.family import Family, expect
from zoo.layouts import split_evenly
from zoo.model import ModelSpec
from zoo.weights import Op


@part(Family, "mpt", source="MosaicML 2023, Introducing MPT-7B; transformers MptForCausalLM")
@dataclass(frozen=True, kw_only=True)
class MPT(Classic):
    """Pre-norm decoder with ALiBi and no bias anywhere; q, k and v lie one after the other.

    alibi_bias_max is followed (16 in MPT-7B-StoryWriter), which transformers reads past. Those of llm-foundry's options that it reads
    past and no published model has are refused.
    """

    architecture = "MptForCausalLM"
    prefix, layers, table, final_norm = "transformer.", "blocks", "wte", "norm_f"
    modules = {"mixer_norm": "norm_1", "mlp_norm": "norm_2", "mixer.projection.o": "attn.out_proj", "mlp.up": "ffn.up_proj",
               "mlp.down": "ffn.down_proj"}  # fmt: skip
    fused = "attn.Wqkv"
    biases = {"qkv": False, "out": False, "mlp": False}
    norm_bias = False
    spelling = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
                "max_position_embeddings": "max_seq_len"}  # fmt: skip
    defaults = {"tie_word_embeddings": True}

    def read(self, config: Config) -> ModelSpec:
        refuse(config, no_bias=True, logit_scale=None, expansion_ratio=4)
        refuse(attention(config), attn_type="multihead_attention", alibi=True, prefix_lm=False, qk_ln=False, attn_uses_sequence_id=False)
        if not str(config.get("norm_type", "layernorm")).endswith("layernorm"):
            raise ValueError(f"norm_type is {config['norm_type']!r}, supported are 'layernorm' and 'low_precision_layernorm'")
        return super().read(config)

    def projection(self, config: Config, l: int) -> Projection:
        options = attention(config)
        return replace(super().projection(config, l), clip=options.get("clip_qkv") or None, logit_scale=options.get("softmax_scale"))

    def position(self, config: Config, l: int) -> Position:
        return ALiBi(max_bias=float(attention(config).get("alibi_bias_max", 8)))

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        mixer = spec.layers[0].mixer
        most, projection = expect(mixer.position, ALiBi).max_bias, expect(mixer.projection, GroupedQuery)
        said = {"clip_qkv": projection.clip, "softmax_scale": projection.logit_scale, "alibi_bias_max": int(most)}
        return {"attn_config": {**attention(config), **said}}

    def mlp(self, config: Config, l: int) -> MLP:
        return Plain(hidden=4 * config["hidden_size"], bias=False)

    def mlp_fields(self, mlp: MLP) -> Fields:
        return {}

    def cut(self, projection: GroupedQuery) -> Op:
        return split_evenly(3)


def attention(config: Config) -> Config:
    return config.get("attn_config") or {}
