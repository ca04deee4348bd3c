"""Phi 3, 3.5 and 4."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Pattern
from zoo.components.position.rope import Rope
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.components.rope_scaling.longrope import LongRope
from zoo.components.rope_scaling.none import NoScaling
from zoo.families._decoder import PRE_NORMS, Config, Decoder, Fields, window_fields, windowed
from zoo.family import Family, expect
from zoo.layouts import split, split_evenly
from zoo.model import ModelSpec
from zoo.weights import Rule


@part(Family, "phi3", source="Phi-3: arXiv:2404.14219; Phi-4: arXiv:2412.08905; transformers Phi3ForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Phi3(Decoder):
    """LLaMA with q, k and v in one matrix, gate and up in another, and LongRoPE for the long contexts."""

    architecture = "Phi3ForCausalLM"
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
    biases = {"qkv": False, "out": False, "mlp": False}
    modules = {"mixer.projection.o": "self_attn.o_proj", "mlp.down": "mlp.down_proj", **PRE_NORMS}

    def position(self, config: Config, l: int) -> Rope:
        rope = expect(super().position(config, l), Rope)
        if not isinstance(rope.scaling, NoScaling | LongRope):
            raise ValueError(f"phi3 has rope type default or longrope, config.json says {rope.scaling.name}")
        return rope

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        rope, found = expect(spec.layers[0].mixer.position, Rope), super().position_fields(spec, config)
        if isinstance(rope.scaling, LongRope):
            found["original_max_position_embeddings"] = rope.scaling.context
        return found

    def pattern(self, config: Config, l: int) -> Pattern:
        return windowed(config, l)

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        return {"sliding_window": window_fields(spec)["sliding_window"]}

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        p = expect(spec.layers[0].mixer.projection, GroupedQuery)
        qkv = tuple(f"layers.{{l}}.mixer.projection.{n}.weight" for n in "qkv")
        rows = [p.heads * p.head_dim, p.kv_heads * p.head_dim, p.kv_heads * p.head_dim]
        gate_up = tuple(f"layers.{{l}}.mlp.{n}.weight" for n in ("gate", "up"))
        return [
            Rule((f"{self.layer_prefix}self_attn.qkv_proj.weight",), qkv, split(rows)),
            Rule((f"{self.layer_prefix}mlp.gate_up_proj.weight",), gate_up, split_evenly(2)),
            *super().layer_rules(spec),
        ]
