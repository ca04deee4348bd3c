"""DeepSeek-V2 and DeepSeek-V2-Lite."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.contracts import MLP, Position, Projection, Router
from zoo.components.mlp.gated import Gated
from zoo.components.mlp.moe import MoE
from zoo.components.position.rope import Rope
from zoo.components.projection.latent import Latent
from zoo.components.registry import part
from zoo.components.rope_scaling.yarn import Yarn
from zoo.components.router.top_k import TopK
from zoo.families._decoder import GATED, PRE_NORMS, Config, Fields, activation, same
from zoo.families._experts import Mixture, gated, mixers_of, one_of, shared_expert
from zoo.families.qwen2_moe import MIXTURE
from zoo.family import Family, expect
from zoo.model import ModelSpec
from zoo.weights import Rule

LATENT = {
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "o": "o_proj",
}


@dataclass(frozen=True, kw_only=True)
class DeepSeek(Mixture):
    """Latent attention, and mixtures with shared experts in all layers but the first ones."""

    spelling = {"num_experts": "n_routed_experts"}
    layout = "interleaved"
    modules = {
        **{f"mixer.projection.{ours}": f"self_attn.{theirs}" for ours, theirs in LATENT.items()},
        **PRE_NORMS,
        **GATED,
        **MIXTURE,
        **gated("mlp.shared", "mlp.shared_experts"),
    }

    # ---- config.json -> spec

    def projection(self, config: Config, l: int) -> Projection:
        count, biased = config["num_attention_heads"], self.bias(config, "qkv")
        one_of(config, "num_key_value_heads", count, None)
        return Latent(heads=count, nope=config["qk_nope_head_dim"], rope=config["qk_rope_head_dim"], value=config["v_head_dim"],
                      rank=config["kv_lora_rank"], q_rank=config.get("q_lora_rank"), bias=biased, out_bias=biased)  # fmt: skip

    def heads(self, config: Config) -> dict[str, int]:
        return {"head_dim": config["qk_rope_head_dim"]}

    def position(self, config: Config, l: int) -> Position:
        """YaRN's mscale_all_dim multiplies the logits of these models, of all channels."""
        rope = expect(super().position(config, l), Rope)
        scaled = isinstance(rope.scaling, Yarn)
        return replace(rope, scaling=replace(rope.scaling, scale_logits=True)) if scaled else rope

    def sparse(self, config: Config, l: int) -> bool:
        one_of(config, "moe_layer_freq", 1)
        return l >= config["first_k_dense_replace"]

    def shared(self, config: Config) -> MLP:
        hidden = config["moe_intermediate_size"] * config["n_shared_experts"]
        return Gated(hidden=hidden, activation=activation(config), bias=self.bias(config, "mlp"))

    # ---- spec -> config.json

    def projection_fields(self, projection: Projection) -> Fields:
        p = expect(projection, Latent)
        return {
            "num_attention_heads": p.heads,
            "num_key_value_heads": p.heads,
            "qk_nope_head_dim": p.nope,
            "qk_rope_head_dim": p.rope,
            "qk_head_dim": p.nope + p.rope,
            "head_dim": p.rope,  # as transformers has it
            "v_head_dim": p.value,
            "kv_lora_rank": p.rank,
            "q_lora_rank": p.q_rank,
            **self.bias_fields(qkv=p.bias),
        }

    def router_fields(self, router: Router) -> Fields:
        r = expect(router, TopK)
        groups = {"n_group": r.groups, "topk_group": r.kept_groups}
        return {**super().router_fields(router), "routed_scaling_factor": r.scale, **groups}

    def shared_fields(self, moe: MoE) -> Fields:
        return {"n_shared_experts": shared_expert(moe).hidden // expect(moe.experts[0], Gated).hidden}

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        layers = [replace(layer, mixer=replace(layer.mixer, position=unscaled(layer.mixer.position))) for layer in spec.layers]
        return super().position_fields(replace(spec, layers=tuple(layers)), config)

    def sparse_fields(self, sparse: list[bool]) -> Fields:
        return {"first_k_dense_replace": sparse.index(True) if True in sparse else len(sparse)}

    # ---- names

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        ranks = {l: getattr(layer.mixer.projection, "q_rank", None) for l, layer in enumerate(spec.layers)}
        straight, theirs = [l for l, rank in ranks.items() if rank is None], f"{self.layer_prefix}self_attn"
        one, two = (same({"layers.{l}.mixer.projection.q_up": f"{theirs}.{q}"}) for q in ("q_proj", "q_b_proj"))
        return super().layer_rules(spec) + mixers_of(one, straight) + mixers_of(two, ranks.keys() - straight)


def unscaled(position: Position) -> Position:
    """What config.json says of a position: that the logits are scaled as well goes without saying."""
    if not (isinstance(position, Rope) and isinstance(position.scaling, Yarn)):
        return position
    return replace(position, scaling=replace(position.scaling, scale_logits=False))


@part(Family, "deepseek_v2", source="DeepSeek-AI 2024, arXiv:2405.04434; transformers DeepseekV2ForCausalLM")
@dataclass(frozen=True, kw_only=True)
class DeepseekV2(DeepSeek):
    """Each token uses experts of a few groups (devices) only; V2-Lite has no groups, and no query latent."""

    architecture = "DeepseekV2ForCausalLM"
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": "mlp_bias"}
    defaults = {"q_lora_rank": 1536, "first_k_dense_replace": 0, "n_shared_experts": 2}

    def router(self, config: Config) -> TopK:
        one_of(config, "scoring_func", "softmax")
        one_of(config, "topk_method", "greedy", "group_limited_greedy")
        one_of(config, "norm_topk_prob", False, None)  # DeepSeek's code and transformers' say different things where it is set
        limited = config.get("topk_method", "greedy") != "greedy"
        groups = {"groups": config["n_group"], "kept_groups": config["topk_group"]} if limited else {"groups": 1, "kept_groups": 1}
        return replace(super().router(config), scale=float(config.get("routed_scaling_factor", 1.0)), **groups)

    def router_fields(self, router: Router) -> Fields:
        method = "greedy" if expect(router, TopK).groups == 1 else "group_limited_greedy"
        return {**super().router_fields(router), "topk_method": method, "norm_topk_prob": False}
