"""Helpers to compare with transformers: random checkpoints that transformers itself wrote to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Give every parameter a random value at scale 1/sqrt(fan in), norms and biases too, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            fan = parameter.shape[-1] if parameter.dim() > 1 else 1
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / fan**0.5 if parameter.dim() > 1 else 1 + 0.5 * noise)
    return model.eval()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def llama_checkpoint(folder: Path, **options: Any) -> Any:
    """A tiny LLaMA with every parameter random, saved by transformers into ``folder``; returns transformers' model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    defaults = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    config = LlamaConfig(**(defaults | options))
    config._attn_implementation = "eager"
    model = randomize(LlamaForCausalLM(config))
    model.save_pretrained(folder)
    return model
