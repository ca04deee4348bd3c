"""OLMoE-1B-7B."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.contracts import Projection
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.families._decoder import ATTENTION, HEAD_NORMS, PRE_NORMS, Config, Fields
from zoo.families._experts import Mixture
from zoo.families.qwen2_moe import MIXTURE
from zoo.family import Family, expect


@part(Family, "olmoe", source="Muennighoff et al. 2024, arXiv:2409.02060; transformers OlmoeForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Olmoe(Mixture):
    """Mixtures in every layer; queries and keys are normed over all heads together, and may be clipped."""

    architecture = "OlmoeForCausalLM"
    expert_key = "intermediate_size"
    normed = True
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": False}
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    modules = {**ATTENTION, **HEAD_NORMS, **PRE_NORMS, **MIXTURE}

    def projection(self, config: Config, l: int) -> Projection:
        return replace(super().projection(config, l), qk_norm=self.norm(config), qk_norm_at="flat", clip=config.get("clip_qkv"))

    def projection_fields(self, projection: Projection) -> Fields:
        found = super().projection_fields(projection)
        found.pop("head_dim", None)  # its config has none: heads always divide the model's width
        return {**found, "clip_qkv": expect(projection, GroupedQuery).clip}
