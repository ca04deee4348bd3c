"""Qwen 3."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.contracts import Projection
from zoo.components.registry import part
from zoo.families._decoder import HEAD_NORMS, Config
from zoo.families.qwen2 import Qwen2
from zoo.family import Family


@part(Family, "qwen3", source="Qwen3: arXiv:2505.09388; transformers Qwen3ForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Qwen3(Qwen2):
    """Qwen 2 with a norm on each head's q and k; heads of 128 and no biases unless config.json says otherwise."""

    architecture = "Qwen3ForCausalLM"
    defaults = {**Qwen2.defaults, "head_dim": 128}
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": False}
    modules = {**Qwen2.modules, **HEAD_NORMS}

    def projection(self, config: Config, l: int) -> Projection:
        return replace(super().projection(config, l), qk_norm=self.norm(config))
