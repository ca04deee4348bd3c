"""gpt-oss-20b and gpt-oss-120b."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import MLP, Kernel, Norm
from zoo.components.kernel.sinks import Sinks
from zoo.components.mlp.clamped import Clamped
from zoo.components.norm.rms import RMS
from zoo.components.registry import part
from zoo.families._decoder import ATTENTION, PRE_NORMS, Config, Fields, Sliding
from zoo.families._experts import Mixture, expert_rule, one_of
from zoo.family import Family, expect
from zoo.layouts import across, interleaved, then, transposed, unstacked
from zoo.model import ModelSpec
from zoo.weights import Rule

YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip


@part(Family, "gpt_oss", source="OpenAI 2025, arXiv:2508.10925; transformers GptOssForCausalLM")
@dataclass(frozen=True, kw_only=True)
class GptOss(Sliding, Mixture):
    """Every other layer sees a window, all have attention sinks and clamped experts with biases.

    An expert's gate and up-projection are the even and the odd columns of one tensor, and the experts of a layer are stacked. Published
    files have these in MXFP4, where they are rows: see the format ``mxfp4``.
    """

    architecture = "GptOssForCausalLM"
    period = 2
    expert_key = "intermediate_size"
    spelling = {"num_experts": "num_local_experts"}
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": False}
    defaults = {"rms_norm_eps": 1e-5, "attention_bias": True, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
                "max_position_embeddings": 131072,
                "rope_theta": 150_000.0, "rope_parameters": YARN}  # fmt: skip
    modules = {**ATTENTION, **PRE_NORMS, "mlp.router": "mlp.router"}
    tensors = {"mixer.kernel.sink": "self_attn.sinks"}

    def kernel(self, config: Config, l: int) -> Kernel:
        return Sinks()

    def norm(self, config: Config) -> Norm:
        return RMS(eps=config["rms_norm_eps"], cast="after_weight")

    def expert(self, config: Config) -> MLP:
        one_of(config, "hidden_act", "silu")
        return Clamped(hidden=config[self.expert_key], alpha=config.get("swiglu_alpha", 1.702), limit=config.get("swiglu_limit", 7.0))

    def expert_fields(self, expert: MLP) -> Fields:
        expert = expect(expert, Clamped)
        return {self.expert_key: expert.hidden, "swiglu_alpha": expert.alpha, "swiglu_limit": expert.limit}

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        experts = f"{self.layer_prefix}mlp.experts"
        pairs, single = then(unstacked(), across(interleaved(), 2)), unstacked()
        return [
            *super().layer_rules(spec),
            expert_rule(f"{experts}.gate_up_proj", ("gate.weight", "up.weight"),
                        then(unstacked(), transposed(), across(interleaved(), 2)), rows=pairs),
            expert_rule(f"{experts}.gate_up_proj_bias", ("gate.bias", "up.bias"), pairs),
            expert_rule(f"{experts}.down_proj", ("down.weight",), then(unstacked(), transposed()), rows=single),
            expert_rule(f"{experts}.down_proj_bias", ("down.bias",), single),
        ]  # fmt: skip
