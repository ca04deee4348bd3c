"""Falcon: 7B (multi-query), 40B, 180B and Falcon 2 (grouped), RefinedWeb (ALiBi)."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Position, Projection, Wiring
from zoo.components.position.alibi import ALiBi
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.components.wiring.parallel import Parallel
from zoo.components.wiring.parallel_norms import ParallelNorms
from zoo.components.wiring.pre import Pre
from zoo.families._classic import Classic, refuse
from zoo.families._decoder import PRE_NORMS, Config, Fields, same
from zoo.family import Family, expect
from zoo.model import ModelSpec
from zoo.weights import Rule


@part(Family, "falcon", source="Almazrouei et al. 2023, arXiv:2311.16867; transformers FalconForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Falcon(Classic):
    """Attention and MLP side by side or one after the other; keys of one head, of groups or of all; rotary or ALiBi.

    ALiBi in transformers is rounded to bfloat16 whatever the dtype; here it is not, which shows beyond 256 tokens.
    """

    architecture = "FalconForCausalLM"
    prefix, layers, table, final_norm = "transformer.", "h", "word_embeddings", "ln_f"
    modules = {"mixer.projection.o": "self_attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}
    fused = "self_attention.query_key_value"
    biases = {"qkv": "bias", "out": "bias", "mlp": "bias"}
    activation_key = "activation"
    spelling = {"intermediate_size": "ffn_hidden_size"}
    defaults = {"activation": "gelu", "tie_word_embeddings": True, "bias": False, "multi_query": True, "parallel_attn": True}

    def read(self, config: Config) -> ModelSpec:
        if config.get("new_decoder_architecture", False):
            refuse(config, parallel_attn=True)
        elif config.get("num_ln_in_parallel_attn") == 2:
            raise ValueError("num_ln_in_parallel_attn is 2, which needs new_decoder_architecture")
        return super().read(config)

    def heads(self, config: Config) -> dict[str, int]:
        usual = super().heads(config)
        if config.get("new_decoder_architecture", False):
            return {**usual, "kv_heads": config.get("num_kv_heads") or usual["heads"]}
        return {**usual, "kv_heads": 1} if config["multi_query"] else usual

    def projection_fields(self, projection: Projection) -> Fields:
        keys = expect(projection, GroupedQuery).kv_heads
        return {**super().projection_fields(projection), "num_kv_heads": keys, "multi_query": keys == 1}

    def position(self, config: Config, l: int) -> Position:
        if config.get("alibi", False):
            return ALiBi(scale=self.heads(config)["head_dim"] ** -0.5)
        return super().position(config, l)

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        biased = isinstance(spec.layers[0].mixer.position, ALiBi)
        return {"alibi": biased, **({} if biased else super().position_fields(spec, config))}

    def wiring(self, config: Config) -> Wiring:
        if not config["parallel_attn"]:
            return Pre()
        norms = config.get("num_ln_in_parallel_attn") or (2 if config.get("new_decoder_architecture", False) else 1)
        return ParallelNorms() if norms == 2 else Parallel()

    def fields(self, spec: ModelSpec, config: Config) -> Fields:
        wiring, p = spec.layers[0].wiring, expect(spec.layers[0].mixer.projection, GroupedQuery)
        two, before = isinstance(wiring, ParallelNorms), isinstance(wiring, Parallel) and config.get("new_decoder_architecture")
        grouped = bool(two or before or p.kv_heads not in (1, p.heads))
        said = {"new_decoder_architecture": grouped, "parallel_attn": not isinstance(wiring, Pre),
                "num_ln_in_parallel_attn": 2 if two else 1 if grouped else None}  # fmt: skip
        return {**super().fields(spec, config), **said}

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        norms = {"mixer_norm": "ln_attn", "mlp_norm": "ln_mlp"} if isinstance(spec.layers[0].wiring, ParallelNorms) else PRE_NORMS
        return [*super().layer_rules(spec), *same({f"layers.{{l}}.{ours}": f"{self.layer_prefix}{n}" for ours, n in norms.items()})]
