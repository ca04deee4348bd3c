"""Qwen3-Next-80B-A3B."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Kernel, Norm, Position, Projection
from zoo.components.kernel.gated_delta_rule import GatedDeltaRule
from zoo.components.norm.rms import RMS
from zoo.components.position.none import NoPosition
from zoo.components.projection.gated_delta import GatedDelta
from zoo.components.projection.gqa_output_gated import OutputGatedGroupedQuery
from zoo.components.registry import part
from zoo.families._decoder import ATTENTION, FULL, GATED, HEAD_NORMS, PRE_NORMS, Config, Fields, layer_type, same
from zoo.families._experts import mixers_of
from zoo.families.qwen2_moe import MIXTURE, SHARED, SharedExpert
from zoo.family import Family
from zoo.layouts import split_groups, viewed
from zoo.model import LayerSpec, ModelSpec
from zoo.weights import Rule

LINEAR = "linear_attention"
OURS = "layers.{l}.mixer.projection"


@part(Family, "qwen3_next", source="Qwen Team 2025, qwen.ai/blog (Qwen3-Next); transformers Qwen3NextForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Qwen3Next(SharedExpert):
    """Three layers of gated DeltaNet for each of attention, whose output is gated; norms of weights about 0; many experts, one shared.

    The modules below ``mtp`` predict more tokens ahead; they are no part of the model.
    """

    architecture = "Qwen3NextForCausalLM"
    left_out = r"mtp\..*"
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": False}
    defaults = {"num_key_value_heads": 2, "norm_topk_prob": True, "head_dim": 256, "partial_rotary_factor": 0.25,
                "max_position_embeddings": 32768,
                "full_attention_interval": 4, "linear_conv_kernel_dim": 4}  # fmt: skip
    modules = {**{o: t for o, t in ATTENTION.items() if not o.endswith(".q")}, **HEAD_NORMS, **PRE_NORMS, **GATED, **MIXTURE, **SHARED}

    # ---- config.json -> spec

    def linear(self, config: Config, l: int) -> bool:
        kind = layer_type(config, l, LINEAR, FULL)
        return kind == LINEAR if kind else (l + 1) % config["full_attention_interval"] != 0

    def projection(self, config: Config, l: int) -> Projection:
        if self.linear(config, l):
            return GatedDelta(
                heads=config["linear_num_value_heads"],
                key_heads=config["linear_num_key_heads"],
                key_dim=config["linear_key_head_dim"],
                value_dim=config["linear_value_head_dim"],
                conv=config["linear_conv_kernel_dim"],
                out_norm=RMS(eps=config["rms_norm_eps"]),
            )
        bias = self.bias(config, "qkv")
        return OutputGatedGroupedQuery(**self.heads(config), bias=bias, out_bias=bias, qk_norm=self.norm(config))

    def position(self, config: Config, l: int) -> Position:
        return NoPosition() if self.linear(config, l) else super().position(config, l)

    def kernel(self, config: Config, l: int) -> Kernel:
        return GatedDeltaRule() if self.linear(config, l) else super().kernel(config, l)

    def norm(self, config: Config) -> Norm:
        return RMS(eps=config.get("rms_norm_eps", 1e-6), offset=1.0, cast="after_weight")

    # ---- spec -> config.json

    def typical(self, spec: ModelSpec) -> LayerSpec:
        return next((layer for layer in spec.layers if not linear(layer)), spec.layers[0])

    def other_fields(self, spec: ModelSpec) -> Fields:
        types = [LINEAR if linear(layer) else FULL for layer in spec.layers]
        delta = next((p for p in (layer.mixer.projection for layer in spec.layers) if isinstance(p, GatedDelta)), None)
        return {**super().other_fields(spec), "layer_types": types, **({} if delta is None else delta_fields(delta))}

    # ---- names

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        projections = dict(enumerate(layer.mixer.projection for layer in spec.layers))
        deltas = {l: p for l, p in projections.items() if isinstance(p, GatedDelta)}
        gated = {l: p for l, p in projections.items() if isinstance(p, OutputGatedGroupedQuery)}
        return [
            *mixers_of(super().layer_rules(spec), projections.keys() - deltas.keys()),
            *(rule for l, p in gated.items() for rule in mixers_of(attention_rules(p, self.layer_prefix), [l])),
            *(rule for l, p in deltas.items() for rule in mixers_of(delta_rules(p, self.layer_prefix), [l])),
        ]


def linear(layer: LayerSpec) -> bool:
    return isinstance(layer.mixer.projection, GatedDelta)


def delta_fields(delta: GatedDelta) -> Fields:
    return {
        "linear_num_value_heads": delta.heads,
        "linear_num_key_heads": delta.key_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv,
    }


def attention_rules(p: OutputGatedGroupedQuery, prefix: str) -> list[Rule]:
    """Each head's gate is stored below its query."""
    split = split_groups(p.heads, [p.head_dim] * 2)
    return [Rule((f"{prefix}self_attn.q_proj.{n}",), (f"{OURS}.q.{n}", f"{OURS}.gate.{n}"), split) for n in ("weight", "bias")]


def delta_rules(p: GatedDelta, prefix: str) -> list[Rule]:
    """Each key head's rows are stored together: its query and key, then values and output gates of the heads that it serves."""
    theirs, serves = f"{prefix}linear_attn", p.heads // p.key_heads
    wide = split_groups(p.key_heads, [p.key_dim, p.key_dim, serves * p.value_dim, serves * p.value_dim])
    narrow = split_groups(p.key_heads, [serves, serves])
    return [
        Rule((f"{theirs}.in_proj_qkvz.weight",), tuple(f"{OURS}.{n}.weight" for n in ("q", "k", "v", "z")), wide),
        Rule((f"{theirs}.in_proj_ba.weight",), tuple(f"{OURS}.{n}.weight" for n in ("beta", "decay")), narrow),
        Rule((f"{theirs}.conv1d.weight",), (f"{OURS}.conv",), viewed((-1, 1, p.conv), (-1, p.conv))),
        Rule.same(f"{theirs}.A_log", f"{OURS}.a_log"),
        Rule.same(f"{theirs}.dt_bias", f"{OURS}.dt_bias"),
        *same({f"{OURS}.out_norm": f"{theirs}.norm", f"{OURS}.o": f"{theirs}.out_proj"}),
    ]
