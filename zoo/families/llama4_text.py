"""The language model of Llama 4 Scout and Maverick."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.contracts import MLP, Pattern, Position, Projection
from zoo.components.mlp.gated import Gated
from zoo.components.mlp.moe import MoE
from zoo.components.norm.rms import RMS
from zoo.components.pattern.causal import Causal
from zoo.components.pattern.chunked import Chunked
from zoo.components.position.none import NoPosition
from zoo.components.position.rope import Rope
from zoo.components.position.temperature import Temperature
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.families._decoder import ATTENTION, FULL, PRE_NORMS, Config, Fields, layer_type
from zoo.families._experts import Mixture, expert_rule, gated
from zoo.family import Family, expect
from zoo.layouts import across, split_evenly, then, transposed, unstacked
from zoo.model import LayerSpec, ModelSpec
from zoo.weights import Rule

CHUNKED = "chunked_attention"


@part(Family, "llama4_text", source="Meta 2025, ai.meta.com/blog/llama-4-multimodal-intelligence; transformers Llama4ForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Llama4Text(Mixture):
    """Layers with rope see a chunk of the row and norm queries and keys after rotation; the others see all and have a temperature."""

    architecture = "Llama4ForCausalLM"
    block = "feed_forward"
    layout = "interleaved"
    expert_key = "intermediate_size"
    spelling = {"num_experts": "num_local_experts"}
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": False}
    # the sizes too: files with a vision model leave out what equals transformers' own
    defaults = {"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
                "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                "num_experts_per_tok": 1, "num_experts": 16, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
                "max_position_embeddings": 4096 * 32, "attention_chunk_size": 8192,
                "use_qk_norm": True, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1}  # fmt: skip
    modules = {
        **ATTENTION,
        **PRE_NORMS,
        **gated("mlp", "feed_forward"),
        "mlp.router": "feed_forward.router",
        **gated("mlp.shared", "feed_forward.shared_expert"),
    }

    # ---- config.json -> spec

    def rotates(self, config: Config, l: int) -> bool:
        given = config.get("no_rope_layers")  # 1 where there is rope, in spite of its name
        if given and l >= len(given):
            raise ValueError(f"no_rope_layers has {len(given)} entries; it must have one for every layer")
        return bool(given[l]) if given else (l + 1) % config.get("no_rope_layer_interval", 4) != 0

    def projection(self, config: Config, l: int) -> Projection:
        normed = config["use_qk_norm"] and self.rotates(config, l)
        norm = RMS(eps=config["rms_norm_eps"], affine=False) if normed else None
        return replace(super().projection(config, l), qk_norm=norm, qk_norm_at="rotated" if normed else "head")

    def position(self, config: Config, l: int) -> Position:
        if self.rotates(config, l):
            return super().position(config, l)
        return Temperature(scale=config["attn_scale"], floor=config["floor_scale"]) if config["attn_temperature_tuning"] else NoPosition()

    def pattern(self, config: Config, l: int) -> Pattern:
        kind, size = layer_type(config, l, CHUNKED, FULL), config["attention_chunk_size"]
        chunked = kind == CHUNKED if kind else self.rotates(config, l) and size is not None
        if chunked and size is None:
            raise ValueError(f"layer_types calls layer {l} {CHUNKED}, and there is no attention_chunk_size")
        return Chunked(size=config["attention_chunk_size"]) if chunked else Causal()

    def sparse(self, config: Config, l: int) -> bool:
        mixtures = config.get("moe_layers")
        return l in mixtures if mixtures is not None else (l + 1) % config.get("interleave_moe_layer_step", 1) == 0

    def shared(self, config: Config) -> MLP:
        return self.expert(config)

    def dense(self, config: Config) -> MLP:
        return super().dense({**config, "intermediate_size": config["intermediate_size_mlp"]})

    # ---- spec -> config.json

    def write(self, spec: ModelSpec, config: Config) -> Fields:
        """Over the config of the whole model, where the language model came out of one: its part of it becomes the config."""
        text = {k: v for k, v in (config.get("text_config") or {}).items() if k not in ("dtype", "torch_dtype")}
        return super().write(spec, {**{k: v for k, v in config.items() if k not in ("text_config", "vision_config")}, **text})

    def typical(self, spec: ModelSpec) -> LayerSpec:
        return next((layer for layer in spec.layers if isinstance(layer.mixer.position, Rope)), spec.layers[0])

    def projection_fields(self, projection: Projection) -> Fields:
        return {**super().projection_fields(projection), "use_qk_norm": expect(projection, GroupedQuery).qk_norm is not None}

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        chunks = [layer.mixer.pattern for layer in spec.layers]
        sizes = [p.size for p in chunks if isinstance(p, Chunked)]
        types = [CHUNKED if isinstance(p, Chunked) else FULL for p in chunks]
        return {"attention_chunk_size": sizes[0] if sizes else None, "layer_types": types}

    def dense_fields(self, mlp: MLP) -> Fields:
        return {"intermediate_size_mlp": expect(mlp, Gated).hidden}

    def shared_fields(self, moe: MoE) -> Fields:
        return {}

    def sparse_fields(self, sparse: list[bool]) -> Fields:
        return {"moe_layers": [l for l, mixture in enumerate(sparse) if mixture]}

    def other_fields(self, spec: ModelSpec) -> Fields:
        positions = [layer.mixer.position for layer in spec.layers]
        tempered = [p for p in positions if isinstance(p, Temperature)]
        tuning = {"floor_scale": tempered[0].floor, "attn_scale": tempered[0].scale} if tempered else {}
        return {
            **super().other_fields(spec),
            "no_rope_layers": [int(isinstance(p, Rope)) for p in positions],
            "attn_temperature_tuning": bool(tempered),
            **tuning,
        }

    # ---- names

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        experts = f"{self.layer_prefix}feed_forward.experts"
        both = then(unstacked(), transposed(), across(split_evenly(2), 2))
        return [
            *super().layer_rules(spec),
            expert_rule(f"{experts}.gate_up_proj", ("gate.weight", "up.weight"), both),
            expert_rule(f"{experts}.down_proj", ("down.weight",), then(unstacked(), transposed())),
        ]
