"""GPT-2."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from zoo.components.contracts import Embed, Position, Projection
from zoo.components.embed.tokens import Tokens
from zoo.components.position.none import NoPosition
from zoo.components.position_embedding.learned import Learned
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.families._classic import Classic, refuse
from zoo.families._decoder import Config, Fields
from zoo.family import Family
from zoo.layouts import split_evenly, then, transposed
from zoo.model import ModelSpec
from zoo.weights import Op, Rule


@part(Family, "gpt2", source="Radford et al. 2019, Language Models are Unsupervised Multitask Learners; transformers GPT2LMHeadModel")
@dataclass(frozen=True, kw_only=True)
class GPT2(Classic):
    """Pre-norm decoder with learned positions; weights lie transposed on disk, q, k and v side by side."""

    architecture = "GPT2LMHeadModel"
    ignored = r".*\.attn\.(masked_)?bias"
    prefix, layers, table, final_norm = "transformer.", "h", "wte", "ln_f"
    modules = {"mixer_norm": "ln_1", "mlp_norm": "ln_2", "mixer.projection.o": "attn.c_proj", "mlp.up": "mlp.c_fc",
               "mlp.down": "mlp.c_proj"}  # fmt: skip
    beside = {"embed.position": "wpe"}
    fused = "attn.c_attn"
    activation_key = "activation_function"
    defaults = {"activation_function": "gelu_new", "tie_word_embeddings": True, "max_position_embeddings": 1024}
    spelling = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
                "max_position_embeddings": "n_positions", "intermediate_size": "n_inner"}  # fmt: skip

    def read(self, config: Config) -> ModelSpec:
        refuse(config, add_cross_attention=False)
        return super().read(config)

    def embed(self, config: Config) -> Embed:
        return Tokens(vocab=config["vocab_size"], position=Learned(count=config["max_position_embeddings"]))

    def projection(self, config: Config, l: int) -> Projection:
        usual = super().projection(config, l)
        scaled, by_depth = config.get("scale_attn_weights", True), config.get("scale_attn_by_inverse_layer_idx", False)
        if scaled and not by_depth:
            return usual
        scale = self.heads(config)["head_dim"] ** -0.5 if scaled else 1.0
        return dataclasses.replace(usual, logit_scale=scale / (l + 1) if by_depth else scale)

    def position(self, config: Config, l: int) -> Position:
        return NoPosition()

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        """The scales, which depend on the layer's position in the model: 1 is no scaling, None the usual one in every layer."""
        first, last = (getattr(layer.mixer.projection, "logit_scale", None) for layer in (spec.layers[0], spec.layers[-1]))
        return {"scale_attn_weights": first != 1.0, "scale_attn_by_inverse_layer_idx": last not in (None, 1.0)}

    def cut(self, projection: GroupedQuery) -> Op:
        return split_evenly(3, -1)

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        return [Rule(r.theirs, r.ours, then(r.op, transposed())) if _is_matrix(r) else r for r in super().layer_rules(spec)]


def _is_matrix(rule: Rule) -> bool:
    return rule.theirs[0].endswith(".weight") and "ln_" not in rule.theirs[0]
