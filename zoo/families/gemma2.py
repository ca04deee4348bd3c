"""Gemma 2."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.contracts import Embed, Head, Kernel, Norm, Projection, Wiring
from zoo.components.head.lm import LMHead
from zoo.components.kernel.sdpa import SDPA
from zoo.components.kernel.softcap import SoftCap
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.components.wiring.sandwich import Sandwich
from zoo.families._decoder import ATTENTION, GATED, Config, Fields, Sliding
from zoo.families.gemma import gemma_embed, gemma_norm
from zoo.family import Family, expect

SANDWICH_NORMS = {
    "mixer_norm": "input_layernorm",
    "mixer_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


@part(Family, "gemma2", source="Gemma 2: arXiv:2408.00118; transformers Gemma2ForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Gemma2(Sliding):
    """Gemma with norms before and after each branch, a window in every second layer, capped attention and output logits."""

    architecture = "Gemma2ForCausalLM"
    activation_key = "hidden_activation"
    defaults = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256,
                "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
                "max_position_embeddings": 8192, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0}  # fmt: skip
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": False}
    modules = {**ATTENTION, **GATED, **SANDWICH_NORMS}
    period = 2

    def settled(self, config: Config) -> Config:
        if config.get("use_bidirectional_attention"):
            raise ValueError("use_bidirectional_attention is not supported in gemma2: transformers' own kernels differ in what it means")
        return super().settled(config)

    def embed(self, config: Config) -> Embed:
        return gemma_embed(config)

    def norm(self, config: Config) -> Norm:
        return gemma_norm(config)

    def wiring(self, config: Config) -> Wiring:
        return Sandwich()

    def projection(self, config: Config, l: int) -> Projection:
        plain, scalar = super().projection(config, l), config["query_pre_attn_scalar"]
        return plain if scalar == self.heads(config)["head_dim"] else replace(plain, logit_scale=scalar**-0.5)

    def projection_fields(self, projection: Projection) -> Fields:
        p = expect(projection, GroupedQuery)
        scalar = p.head_dim if p.logit_scale is None else round(p.logit_scale**-2)
        return super().projection_fields(p) | {"query_pre_attn_scalar": scalar}

    def kernel(self, config: Config, l: int) -> Kernel:
        cap = config["attn_logit_softcapping"]
        return SDPA() if cap is None else SoftCap(cap=cap)

    def kernel_fields(self, kernel: Kernel) -> Fields:
        return {"attn_logit_softcapping": kernel.cap if isinstance(kernel, SoftCap) else None}

    def head(self, config: Config) -> Head:
        return LMHead(tied=config["tie_word_embeddings"], softcap=config["final_logit_softcapping"])

    def head_fields(self, head: Head) -> Fields:
        return super().head_fields(head) | {"final_logit_softcapping": expect(head, LMHead).softcap}
