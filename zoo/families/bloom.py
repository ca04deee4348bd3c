"""BLOOM."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import MLP, Embed, Position, Wiring
from zoo.components.embed.tokens import Tokens
from zoo.components.mlp.plain import Plain
from zoo.components.position.alibi import ALiBi
from zoo.components.registry import part
from zoo.components.wiring.pre import Pre
from zoo.components.wiring.pre_shortcut import PreShortcut
from zoo.families._classic import Classic
from zoo.families._decoder import PRE_NORMS, Config, Fields
from zoo.family import Family
from zoo.model import ModelSpec


@part(Family, "bloom", source="Le Scao et al. 2022, arXiv:2211.05100; transformers BloomForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Bloom(Classic):
    """Pre-norm decoder with ALiBi and a norm after the embedding; q, k and v lie together head by head."""

    architecture = "BloomForCausalLM"
    prefix, layers, table, final_norm = "transformer.", "h", "word_embeddings", "ln_f"
    modules = {"mixer.projection.o": "self_attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h", **PRE_NORMS}
    beside = {"embed.norm": "word_embeddings_layernorm"}
    fused = "self_attention.query_key_value"
    spelling = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
                "max_position_embeddings": "seq_length"}  # fmt: skip
    defaults = {"tie_word_embeddings": True}

    def embed(self, config: Config) -> Embed:
        return Tokens(vocab=config["vocab_size"], norm=self.norm(config))

    def position(self, config: Config, l: int) -> Position:
        return ALiBi()

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        return {}

    def mlp(self, config: Config, l: int) -> MLP:
        return Plain(hidden=4 * config["hidden_size"], activation="gelu_tanh")

    def mlp_fields(self, mlp: MLP) -> Fields:
        return {}

    def wiring(self, config: Config) -> Wiring:
        return PreShortcut() if config.get("apply_residual_connection_post_layernorm", False) else Pre()

    def wiring_fields(self, wiring: Wiring) -> Fields:
        return {"apply_residual_connection_post_layernorm": isinstance(wiring, PreShortcut)}
