"""Qwen1.5-MoE and Qwen2-57B-A14B."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import MLP, Pattern
from zoo.components.mlp.gated import Gated
from zoo.components.mlp.moe import MoE
from zoo.components.pattern.causal import Causal
from zoo.components.registry import part
from zoo.families._decoder import ATTENTION, FULL, GATED, PRE_NORMS, SLIDING, Config, Fields, activation, window_fields, windowed
from zoo.families._experts import Stepped, gated, shared_expert
from zoo.family import Family
from zoo.model import ModelSpec

MIXTURE = {"mlp.router": "mlp.gate", **gated("mlp.experts.{e}", "mlp.experts.{e}")}
SHARED = gated("mlp.shared", "mlp.shared_expert")


@dataclass(frozen=True, kw_only=True)
class SharedExpert(Stepped):
    """A shared expert that a sigmoid of its own weighs, beside the chosen ones."""

    tensors = {"mlp.shared_gate": "mlp.shared_expert_gate.weight"}

    def shared(self, config: Config) -> MLP:
        return Gated(hidden=config["shared_expert_intermediate_size"], activation=activation(config))

    def shared_fields(self, moe: MoE) -> Fields:
        return {"shared_expert_intermediate_size": shared_expert(moe).hidden}


@part(Family, "qwen2_moe", source="Qwen Team 2024, arXiv:2407.10671, section 2.2.2; transformers Qwen2MoeForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Qwen2Moe(SharedExpert):
    """Qwen2 with many small experts, whose weights are not made to sum to 1, and a gated shared one."""

    architecture = "Qwen2MoeForCausalLM"
    biases = {"qkv": "qkv_bias", "out": False, "mlp": False}
    defaults = {"num_key_value_heads": 16, "qkv_bias": True, "max_position_embeddings": 32768}
    modules = {**ATTENTION, **PRE_NORMS, **GATED, **MIXTURE, **SHARED}

    def pattern(self, config: Config, l: int) -> Pattern:
        if not config.get("use_sliding_window"):
            return Causal()
        first = [SLIDING if l % 2 == 0 and l < config.get("max_window_layers", 28) else FULL for l in range(config["num_hidden_layers"])]
        return windowed({**config, "layer_types": config.get("layer_types") or first}, l)

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        found = window_fields(spec)
        return {"use_sliding_window": SLIDING in found["layer_types"], **found}
