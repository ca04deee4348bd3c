"""OLMo 2."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.contracts import Norm, Projection, Wiring
from zoo.components.norm.rms import RMS
from zoo.components.registry import part
from zoo.components.wiring.output_norm import OutputNorm
from zoo.families._decoder import ATTENTION, GATED, HEAD_NORMS, Config, Decoder
from zoo.family import Family


@part(Family, "olmo2", source="OLMo 2: arXiv:2501.00656; transformers Olmo2ForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Olmo2(Decoder):
    """Norms on what each branch adds, and on all heads of q and of k together."""

    architecture = "Olmo2ForCausalLM"
    defaults = {"rms_norm_eps": 1e-5}
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": False}
    modules = {**ATTENTION, **GATED, **HEAD_NORMS, "mixer_out_norm": "post_attention_layernorm",
               "mlp_out_norm": "post_feedforward_layernorm"}  # fmt: skip

    def norm(self, config: Config) -> Norm:
        return RMS(eps=config["rms_norm_eps"], cast="after_weight")

    def projection(self, config: Config, l: int) -> Projection:
        return replace(super().projection(config, l), qk_norm=self.norm(config), qk_norm_at="flat")

    def wiring(self, config: Config) -> Wiring:
        return OutputNorm()
