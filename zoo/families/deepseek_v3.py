"""DeepSeek-V3, V3.1 and R1."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from zoo.checkpoint import CheckpointError
from zoo.components.contracts import Position
from zoo.components.position.rope import Rope
from zoo.components.registry import part
from zoo.components.router.top_k import TopK
from zoo.families._decoder import Config, Fields
from zoo.families._experts import one_of
from zoo.families.deepseek_v2 import DeepSeek
from zoo.family import Family, expect
from zoo.model import ModelSpec
from zoo.multi_token import Chained, StoredDepths
from zoo.weights import Rule

LAYER = re.compile(r"model\.layers\.(\d+)\.")
AROUND = {"embed_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


@part(Family, "deepseek_v3", source="DeepSeek-AI 2024, arXiv:2412.19437; transformers DeepseekV3ForCausalLM")
@dataclass(frozen=True, kw_only=True)
class DeepseekV3(DeepSeek):
    """Sigmoid scores with a correction that takes part in choosing only; experts of a few groups (nodes) for each token.

    The layer after the last one predicts two tokens ahead; it is no part of the model, ``zoo.multi_token.load`` reads it.
    """

    architecture = "DeepseekV3ForCausalLM"
    normed = True
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": False}
    tensors = {"mlp.router.correction": "mlp.gate.e_score_correction_bias"}
    defaults = {"q_lora_rank": 1536, "first_k_dense_replace": 3, "n_shared_experts": 1, "norm_topk_prob": True, "rope_interleave": True,
                "max_position_embeddings": 4096, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}  # fmt: skip

    def position(self, config: Config, l: int) -> Position:
        rope = expect(super().position(config, l), Rope)
        return rope if config["rope_interleave"] else replace(rope, layout="half")

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        rope = expect(spec.layers[0].mixer.position, Rope)
        return {**super().position_fields(spec, config), "rope_interleave": rope.layout == "interleaved"}

    def router(self, config: Config) -> TopK:
        one_of(config, "scoring_func", "sigmoid")
        one_of(config, "topk_method", "noaux_tc")
        groups = {"groups": config["n_group"], "kept_groups": config["topk_group"]}
        return replace(super().router(config), scale=float(config["routed_scaling_factor"]), **groups)

    def other_fields(self, spec: ModelSpec) -> Fields:
        return {**super().other_fields(spec), "num_nextn_predict_layers": 0}  # the files of a saved model hold the model alone

    def multi_token(self, config: Config) -> StoredDepths | None:
        config = self.settled(config)
        count, first = config.get("num_nextn_predict_layers") or 0, config["num_hidden_layers"]
        if not count:
            return None
        places = [f"{self.prefix}{self.layers}.{first + k}" for k in range(count)]
        return StoredDepths(
            spec=Chained(layers=(self.layer({**config, "first_k_dense_replace": 0}, first),) * count, norm=self.norm(config)),
            names=tuple({ours: f"{place}.{theirs}" for ours, theirs in AROUND.items()} for place in places),
            copies={f"{place}.{copy}": own for place in places for copy, own in COPIES.items()},
        )

    def rules_for(self, spec: ModelSpec, names: Collection[str]) -> list[Rule]:
        beyond = {int(m[1]) for m in map(LAYER.match, names) if m} - set(range(len(spec.layers)))
        odd = sorted(l for l in beyond if f"model.layers.{l}.eh_proj.weight" not in names)
        if odd:
            raise CheckpointError(f"the files have layers {odd}, which predict nothing ahead (they have no eh_proj), where config.json's "
                                  f"num_hidden_layers is {len(spec.layers)}; correct it")  # fmt: skip
        return super().rules_for(spec, names)

    def leaves_out(self, name: str, spec: ModelSpec) -> bool:
        layer = LAYER.match(name)
        return layer is not None and int(layer[1]) >= len(spec.layers)
