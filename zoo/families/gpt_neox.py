"""GPT-NeoX 20B, Pythia and models of their layout."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Wiring
from zoo.components.registry import part
from zoo.components.wiring.parallel_norms import ParallelNorms
from zoo.components.wiring.pre import Pre
from zoo.families._classic import Classic
from zoo.families._decoder import PRE_NORMS, Config, Fields
from zoo.family import Family


@part(Family, "gpt_neox", source="Black et al. 2022, arXiv:2204.06745; Pythia: arXiv:2304.01373; transformers GPTNeoXForCausalLM")
@dataclass(frozen=True, kw_only=True)
class GPTNeoX(Classic):
    """Attention and MLP side by side, each on its own norm; a part of each head is rotated; q, k and v lie together head by head."""

    architecture = "GPTNeoXForCausalLM"
    ignored = r".*\.attention\.(masked_)?bias"
    prefix, table, final_norm, out = "gpt_neox.", "embed_in", "final_layer_norm", "embed_out"
    modules = {"mixer.projection.o": "attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h", **PRE_NORMS}
    fused = "attention.query_key_value"
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": True}
    norm_key = "layer_norm_eps"
    spelling = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    defaults = {"hidden_act": "gelu", "partial_rotary_factor": 0.25, "attention_bias": True, "intermediate_size": 24576}

    def wiring(self, config: Config) -> Wiring:
        return ParallelNorms() if config.get("use_parallel_residual", True) else Pre()

    def wiring_fields(self, wiring: Wiring) -> Fields:
        return {"use_parallel_residual": isinstance(wiring, ParallelNorms)}
