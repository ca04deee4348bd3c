"""Small random models for the tests of quantization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import zoo
from zoo.model import Model

MOE = {"name": "moe", "router": {"name": "top_k", "k": 1}, "experts": [{"repeat": 8, "name": "gated", "hidden": 32}]}


def small(mlp: Any = None, layers: int = 2, tied: bool = True, bias: bool = False, seed: int = 0) -> Model:
    """A random model of width 64 over 50 tokens, with attention and a gated MLP (or the given one) of width 96."""
    projection = {"name": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 16, "bias": bias}
    layer = {"mixer": {"projection": projection, "position": {"name": "rope"}}, "mlp": mlp or {"name": "gated", "hidden": 96}}
    spec = {"width": 64, "context": 64, "embed": {"name": "tokens", "vocab": 50}, "layers": [{"repeat": layers, "of": [layer]}],
            "head": {"name": "lm", "tied": tied}}  # fmt: skip
    return zoo.build(spec, seed=seed)


def ids(samples: int = 6, length: int = 24, seed: int = 1) -> Tensor:
    return torch.randint(50, (samples, length), generator=torch.Generator().manual_seed(seed))


def same_bits(a: Model, b: Model) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
