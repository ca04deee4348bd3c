"""StableLM 2 and 3B."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.contracts import Norm, Projection, Wiring
from zoo.components.norm.group import Group
from zoo.components.norm.layer import Layer
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.components.wiring.parallel import Parallel
from zoo.components.wiring.pre import Pre
from zoo.families._decoder import Config, Decoder, Fields, heads
from zoo.family import Family, expect
from zoo.layouts import joined
from zoo.model import ModelSpec
from zoo.weights import Rule


@part(Family, "stablelm", source="Stable LM 2: arXiv:2402.17834; transformers StableLmForCausalLM")
@dataclass(frozen=True, kw_only=True)
class StableLM(Decoder):
    """Layer norms, rope on a quarter of each head; in the larger ones a norm of its own for each head, and parallel branches."""

    architecture = "StableLmForCausalLM"
    defaults = {"num_key_value_heads": 32, "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5, "max_position_embeddings": 4096}
    biases = {"qkv": "use_qkv_bias", "out": False, "mlp": False}

    def heads(self, config: Config) -> Fields:
        return heads({**config, "head_dim": None})

    def norm(self, config: Config) -> Norm:
        return Layer(eps=config["layer_norm_eps"])

    def norm_fields(self, norm: Norm) -> Fields:
        return {"layer_norm_eps": expect(norm, Layer).eps}

    def projection(self, config: Config, l: int) -> Projection:
        plain = super().projection(config, l)
        if not config.get("qk_layernorm"):
            return plain
        norm = Group(size=plain.rotary_width, eps=config["layer_norm_eps"], bias=False)
        return replace(plain, qk_norm=norm, qk_norm_at="flat")

    def projection_fields(self, projection: Projection) -> Fields:
        return super().projection_fields(projection) | {"qk_layernorm": expect(projection, GroupedQuery).qk_norm is not None}

    def wiring(self, config: Config) -> Wiring:
        return Parallel() if config.get("use_parallel_residual") else Pre()

    def wiring_fields(self, wiring: Wiring) -> Fields:
        return {"use_parallel_residual": isinstance(wiring, Parallel)}

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        p = expect(spec.layers[0].mixer.projection, GroupedQuery)
        return [*super().layer_rules(spec), self.head_norms("q", p.heads), self.head_norms("k", p.kv_heads)]

    def head_norms(self, name: str, count: int) -> Rule:
        theirs = tuple(f"{self.layer_prefix}self_attn.{name}_layernorm.norms.{h}.weight" for h in range(count))
        return Rule(theirs, (f"layers.{{l}}.mixer.projection.{name}_norm.weight",), joined(count))
