"""MiniMax-Text-01 and MiniMax-M1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zoo.components.contracts import Kernel, Pattern, Position, Projection
from zoo.components.kernel.lightning import Lightning as LightningKernel
from zoo.components.pattern.causal import Causal
from zoo.components.pattern.window import Window
from zoo.components.position.none import NoPosition
from zoo.components.position.rope import Rope
from zoo.components.projection.lightning import Lightning
from zoo.components.registry import part
from zoo.components.wiring.pre_shortcut import PreShortcut
from zoo.families._decoder import FULL, Config, Fields, layer_type, same
from zoo.families._experts import mixers_of, one_of
from zoo.families.mixtral import Mixtral
from zoo.family import Family, expect
from zoo.layouts import split_groups
from zoo.model import LayerSpec, ModelSpec
from zoo.weights import Rule

LINEAR = "linear_attention"
KINDS = {FULL: "full_attn", LINEAR: "linear_attn"}  # layer type -> before the names of its factors


@part(Family, "minimax", source="MiniMax 2025, arXiv:2501.08313; transformers MiniMaxForCausalLM")
@dataclass(frozen=True, kw_only=True)
class MiniMax(Mixtral):
    """Layers of lightning attention between some of softmax attention; the residual starts at the norms, with factors on both sides.

    Files of transformers hold the tables of the decays, which follow from the sizes.
    """

    architecture = "MiniMaxForCausalLM"
    ignored = r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)"

    # ---- config.json -> spec

    def settled(self, config: Config) -> Config:
        """Files for MiniMax's own code say 0 of a lightning layer and 1 of a softmax one."""
        config = super().settled(config)
        words, given = dict(enumerate((LINEAR, FULL))), config.get("attn_type_list")
        if config.get("layer_types") or not given:
            return config
        if not set(given) <= words.keys():
            raise ValueError(f"attn_type_list must hold 0 (lightning) and 1 (softmax) alone, it is {given}")
        return {**config, "layer_types": [words[kind] for kind in given]}

    def kind(self, config: Config, l: int) -> str:
        return layer_type(config, l, *KINDS) or (FULL if l % 2 == 0 else LINEAR)

    def layer(self, config: Config, l: int) -> LayerSpec:
        def factor(name: str) -> float:
            return float(config.get(f"{name}_factor", 1.0))

        attention = KINDS[self.kind(config, l)]
        wiring = PreShortcut(mixer_shortcut=factor(f"{attention}_alpha"), mixer_gain=factor(f"{attention}_beta"),
                             mlp_shortcut=factor("mlp_alpha"), mlp_gain=factor("mlp_beta"))  # fmt: skip
        return replace(super().layer(config, l), wiring=wiring)

    def projection(self, config: Config, l: int) -> Projection:
        if self.kind(config, l) == FULL:
            return super().projection(config, l)
        one_of(config, "hidden_act", "silu")
        return Lightning(heads=config["num_attention_heads"], head_dim=self.heads(config)["head_dim"])

    def position(self, config: Config, l: int) -> Position:
        if self.kind(config, l) != FULL:
            return NoPosition()
        rope, width = expect(super().position(config, l), Rope), config.get("rotary_dim")
        return rope if width in (None, self.heads(config)["head_dim"]) else replace(rope, width=width)

    def pattern(self, config: Config, l: int) -> Pattern:
        return super().pattern({**config, "layer_types": None}, l) if self.kind(config, l) == FULL else Causal()

    def kernel(self, config: Config, l: int) -> Kernel:
        return super().kernel(config, l) if self.kind(config, l) == FULL else LightningKernel(depth=config["num_hidden_layers"])

    # ---- spec -> config.json

    def typical(self, spec: ModelSpec) -> LayerSpec:
        return next((layer for layer in spec.layers if not linear(layer)), spec.layers[0])

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        rope = expect(self.typical(spec).mixer.position, Rope)
        if rope.width is not None:
            raise ValueError(f"transformers' MiniMax turns every channel of a head, the model the first {rope.width}")
        return super().position_fields(spec, config)

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        pattern = self.typical(spec).mixer.pattern
        types = {"attn_type_list": [int(not linear(layer)) for layer in spec.layers]} if config.get("attn_type_list") else {}
        return {"sliding_window": pattern.size if isinstance(pattern, Window) else None, **types}

    def other_fields(self, spec: ModelSpec) -> Fields:
        types = [LINEAR if linear(layer) else FULL for layer in spec.layers]
        found: dict[str, Any] = {"layer_types": types}
        for layer, kind in zip(spec.layers, types, strict=True):
            wiring = expect(layer.wiring, PreShortcut)
            found |= {f"{KINDS[kind]}_alpha_factor": wiring.mixer_shortcut, f"{KINDS[kind]}_beta_factor": wiring.mixer_gain,
                      "mlp_alpha_factor": wiring.mlp_shortcut, "mlp_beta_factor": wiring.mlp_gain}  # fmt: skip
        return {**super().other_fields(spec), **found}

    # ---- names

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        projections = dict(enumerate(layer.mixer.projection for layer in spec.layers))
        lightning = {l: p for l, p in projections.items() if isinstance(p, Lightning)}
        return [
            *mixers_of(super().layer_rules(spec), projections.keys() - lightning.keys()),
            *(rule for l, p in lightning.items() for rule in mixers_of(lightning_rules(p, self.layer_prefix), [l])),
        ]


def lightning_rules(p: Lightning, prefix: str) -> list[Rule]:
    """The rows of each head's query, key and value are stored together."""
    ours, theirs = "layers.{l}.mixer.projection", f"{prefix}self_attn"
    qkv = Rule((f"{theirs}.qkv_proj.weight",), tuple(f"{ours}.{n}.weight" for n in "qkv"), split_groups(p.heads, [p.head_dim] * 3))
    return [qkv, *same({f"{ours}.gate": f"{theirs}.output_gate", f"{ours}.out_norm": f"{theirs}.norm", f"{ours}.o": f"{theirs}.out_proj"})]


def linear(layer: LayerSpec) -> bool:
    return isinstance(layer.mixer.projection, Lightning)
