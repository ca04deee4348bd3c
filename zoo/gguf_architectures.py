"""What GGUF's architectures are in Hugging Face's words: config.json of a file's metadata, and how its tensors were changed.

Source: the keys of ``gguf.constants`` and what llama.cpp's convert_hf_to_gguf.py writes under them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.checkpoint import CheckpointError
from zoo.components.ops.rotary import frequencies
from zoo.components.rope_scaling.llama3 import Llama3

Fields = dict[str, Any]
DIVISORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
CONSUMED = frozenset({DIVISORS, SHORT, LONG})  # tensors that say how rope is scaled
SCALING = {"type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow"}
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose attention scale follows the width, which no key says


class Described(ABC):
    """A GGUF file as its header has it. metadata: its keys. architecture: what the file calls it. reference: what errors call the file."""

    metadata: Mapping[str, Any]
    architecture: str
    reference: str

    def key(self, name: str, default: Any = None) -> Any:
        """A metadata value of the architecture, e.g. ``block_count``. Raises CheckpointError where it must be there and is not."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise CheckpointError(f"{self.reference}: the metadata has no {self.architecture}.{name}")
        return float(str(np.float32(value))) if isinstance(value, float) else value  # the decimal that was meant

    @abstractmethod
    def has(self, tensor: str) -> bool: ...

    @abstractmethod
    def shape(self, tensor: str) -> tuple[int, ...]: ...

    @abstractmethod
    def values(self, tensor: str) -> Tensor:
        """A tensor under its name in the file, decoded to float32."""


@dataclass(frozen=True)
class Architecture:
    """model_type: of config.json. more: fields beyond those that all have. permuted: rows of q and k lie in interleaved pairs.

    norm_offset: was added to the weights of norms. epsilon: the config's word for that of norms, and the file's key.
    """

    model_type: str
    more: Callable[[Described, int], Fields] = lambda file, head_dim: {}
    permuted: bool = False
    norm_offset: float = 0.0
    epsilon: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")

    def config(self, file: Described) -> Fields:
        """config.json of a file. Raises CheckpointError for a key that must be there and is not."""
        width, heads = file.key("embedding_length"), file.key("attention.head_count")
        turned = file.metadata.get(f"{file.architecture}.rope.dimension_count")
        plain = turned if self.permuted and turned else width // heads  # LLaMA's converter always wrote the head's width there
        head_dim = file.key("attention.key_length", plain)
        found = {
            "model_type": self.model_type,
            "vocab_size": file.shape("token_embd.weight")[0] if file.has("token_embd.weight") else file.key("vocab_size"),
            "hidden_size": width,
            "intermediate_size": file.key("feed_forward_length"),
            "num_hidden_layers": file.key("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": file.key("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": file.key("context_length", 2048),
            self.epsilon[0]: file.key(self.epsilon[1]),
            "attention_bias": file.has("blk.0.attn_q.bias"),
            "mlp_bias": file.has("blk.0.ffn_up.bias"),
            "tie_word_embeddings": not file.has("output.weight"),
            "rope_theta": float(file.key("rope.freq_base", 10_000.0)),
            "rope_scaling": scaling(file, head_dim),
            "torch_dtype": "float32",
            **({"partial_rotary_factor": turned / head_dim} if turned and turned != head_dim else {}),
            **{ours: file.metadata[f"tokenizer.ggml.{key}"] for ours, key in TOKENS.items() if f"tokenizer.ggml.{key}" in file.metadata},
        }
        return found | self.more(file, head_dim)


def scaling(file: Described, head_dim: int) -> Fields | None:
    """Rope scaling from the metadata, or from what Llama 3 and Phi 3 files carry as tensors.

    Raises CheckpointError for settings that it does not know: they would change every number.
    """
    prefix = f"{file.architecture}.rope.scaling."
    given = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    known = SCALING | ({"attn_factor"} if file.has(LONG) or given.get("attn_factor") == 1.0 else set())
    unknown = [key for key in given if key not in known]
    if unknown:
        raise CheckpointError(f"{file.reference}: {', '.join(prefix + key for key in unknown)} is not supported")
    if file.has(DIVISORS):
        return _llama3_scaling(file, head_dim)
    original = file.key("rope.scaling.original_context_length", file.key("context_length", 2048))
    if file.has(LONG):
        factors = {"short_factor": file.values(SHORT).tolist(), "long_factor": file.values(LONG).tolist()}
        kept = {"attention_factor": file.key("rope.scaling.attn_factor", 1.0), "original_max_position_embeddings": original}
        return {"rope_type": "longrope", **factors, **kept}
    kind = file.key("rope.scaling.type", "none")
    if kind == "none":
        return None
    found = {"rope_type": kind, "factor": file.key("rope.scaling.factor")}
    if kind != "yarn":
        return found
    ramp = {"beta_fast": file.key("rope.scaling.yarn_beta_fast", 32.0), "beta_slow": file.key("rope.scaling.yarn_beta_slow", 1.0)}
    return found | ramp | {"original_max_position_embeddings": original}


def _llama3_scaling(file: Described, head_dim: int) -> Fields:
    """The published Llama 3 setting whose divisors the file holds."""
    theta, held = float(file.key("rope.freq_base", 10_000.0)), file.values(DIVISORS)
    for factor in (8.0, 16.0, 32.0):
        setting = Llama3(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, context=8192)
        wanted = frequencies(theta, head_dim) / setting.frequencies(theta, head_dim, None)
        if wanted.shape == held.shape and torch.allclose(wanted, held, rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192}  # fmt: skip
    raise CheckpointError(f"{file.reference}: {DIVISORS} holds divisors of no published Llama 3 setting")


def _gemma2(file: Described, head_dim: int) -> Fields:
    """Windows and caps. The scale of the logits is by the head's width but in the largest model."""
    large = file.key("block_count") == GEMMA_27B[file.architecture]
    return {
        "query_pre_attn_scalar": file.key("embedding_length") // file.key("attention.head_count") if large else head_dim,
        "sliding_window": file.key("attention.sliding_window", 4096),
        "attn_logit_softcapping": file.metadata.get(f"{file.architecture}.attn_logit_softcapping"),
        "final_logit_softcapping": file.metadata.get(f"{file.architecture}.final_logit_softcapping"),
    }


def _gemma3(file: Described, head_dim: int) -> Fields:
    pattern = file.key("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, int):
        raise CheckpointError(f"{file.reference}: attention.sliding_window_pattern is {pattern!r}; supported: one number")
    return _gemma2(file, head_dim) | {
        "sliding_window_pattern": pattern,
        "rope_local_base_freq": float(file.key("rope.freq_base_swa", 10_000.0)),
        "rope_theta": float(file.key("rope.freq_base", 1_000_000.0)),
    }


def _phi3(file: Described, head_dim: int) -> Fields:
    context = file.key("context_length", 4096)
    return {
        "sliding_window": file.metadata.get("phi3.attention.sliding_window") or None,
        "original_max_position_embeddings": file.key("rope.scaling.original_context_length", context),
    }


def _olmo2(file: Described, head_dim: int) -> Fields:
    if "olmo2.attention.sliding_window" in file.metadata:
        raise CheckpointError(f"{file.reference}: it is an OLMo 3 model (it has sliding windows), which is not supported")
    return {}


def _granite(file: Described, head_dim: int) -> Fields:
    words = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
             "logits_scaling": "logit_scale"}  # fmt: skip
    usual: Mapping[str, float] = {"attention_multiplier": head_dim**-0.5}
    return {ours: file.key(key, usual.get(ours, 1.0)) for ours, key in words.items()}


def _cohere2(file: Described, head_dim: int) -> Fields:
    return {"logit_scale": file.key("logit_scale"), "sliding_window": file.key("attention.sliding_window"), "sliding_window_pattern": 4}


ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture("gemma2", _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", _gemma3, norm_offset=1.0),
    "phi3": Architecture("phi3", _phi3),
    "olmo2": Architecture("olmo2", _olmo2),
    "granite": Architecture("granite", _granite, permuted=True),
    "smollm3": Architecture("smollm3", permuted=True),
    "cohere2": Architecture("cohere2", _cohere2, epsilon=("layer_norm_eps", "attention.layer_norm_epsilon")),
}
