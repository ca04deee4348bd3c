"""Attention whose output is gated equals its formula and Qwen3-Next's layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.components.draw import draw, randomise
from zoo.components.contracts import NoCache, Step
from zoo.components.registry import get
from zoo.components.spec import load
from zoo.model import Mixer, MixerSpec

M, T = 32, 7


@torch.no_grad()
def test_the_formula_of_the_paper() -> None:
    """Equation 5 with the gate after attention: one number for each channel of each head."""
    spec = get("projection", "gqa_output_gated").small()
    mixer = randomise(MixerSpec(projection=spec, kernel=get("kernel", "eager").small()).build(M, 0))  # pyright: ignore[reportArgumentType]
    p, x = mixer.projection, draw(1, T, M)
    q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (p.q, p.k, p.v))
    o = nn.functional.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
    want = p.o(o.transpose(1, 2).flatten(-2) * torch.sigmoid(p.gate(x)))
    torch.testing.assert_close(mixer(x, Step.plain(0, 1, T), NoCache()), want, rtol=1e-5, atol=1e-5)


def qwen() -> tuple[Any, Any, Mixer]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = qwen3_next.Qwen3NextConfig(hidden_size=M, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
                                        rope_parameters=rope, attention_bias=True)  # fmt: skip
    config._attn_implementation = "eager"
    theirs = randomise(qwen3_next.Qwen3NextAttention(config, 0)).eval()
    norm = {"name": "rms", "offset": 1.0, "cast": "after_weight"}
    projection = {"name": "gqa_output_gated", "heads": 4, "kv_heads": 2, "head_dim": 8, "qk_norm": norm, "bias": True, "out_bias": True}
    mixer = load(MixerSpec, {"projection": projection, "position": {"name": "rope", "width": 4}}).build(M, 0).eval()
    state = {}
    for name, tensor in theirs.state_dict().items():
        module, leaf = name.removesuffix("_proj.weight").removesuffix("_proj.bias"), name.rpartition(".")[2]
        if module == "q":
            query, gate = tensor.unflatten(0, (4, 2, 8)).unbind(1)
            state |= {f"q.{leaf}": query.flatten(0, 1), f"gate.{leaf}": gate.flatten(0, 1)}
        else:
            state[name.replace("_proj", "")] = tensor
    mixer.projection.load_state_dict(state)
    return theirs, qwen3_next.Qwen3NextRotaryEmbedding(config), mixer


@torch.no_grad()
def test_equals_qwen3_next() -> None:
    theirs, rotary, mixer = qwen()
    x, mask = draw(2, T, M), torch.full((T, T), float("-inf")).triu(1)[None, None]
    want = theirs(x, position_embeddings=rotary(x, torch.arange(T)[None]), attention_mask=mask)[0]
    torch.testing.assert_close(mixer(x, Step.plain(0, 2, T), NoCache()), want, rtol=1e-5, atol=1e-5)
