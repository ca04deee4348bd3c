"""LLaMA 1, 2, 3 and models of its layout (SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.registry import part
from zoo.families._decoder import Decoder
from zoo.family import Family


@part(Family, "llama", source="Touvron et al. 2023, arXiv:2302.13971; Llama 3: arXiv:2407.21783; transformers LlamaForCausalLM")
@dataclass(frozen=True, kw_only=True)
class Llama(Decoder):
    """Pre-norm decoder with rotary grouped-query attention and a gated MLP."""

    architecture = "LlamaForCausalLM"
