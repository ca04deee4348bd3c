"""Caches as the tests open and fill them: one mixer, rows of made-up vectors, calls of unequal length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.components.mixes import M, Mix
from zoo.components import registry
from zoo.components.contracts import CachePolicy, Step
from zoo.components.spec import load
from zoo.model import Mixer

CPU = torch.device("cpu")
PLAIN = Mix("gqa", "rope", "causal", "eager")
NAMES = registry.names("cache")


def policy(name: str, **options: Any) -> CachePolicy:
    return load(CachePolicy, {"name": name, **registry.get("cache", name).example, **options})


def open_cache(spec: CachePolicy, mix: Mixer, rows: int, dtype: torch.dtype = torch.float64) -> Any:
    return spec.build([mix.slots], rows, dtype, CPU)


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, length, M, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXACT = [n for n in NAMES if policy(n).exact]


def call(mix: Mixer, cache: Any, x: Tensor, start: list[int], count: list[int]) -> Tensor:
    """Run count[b] tokens of each row of x [B, T, M] from start[b] on, padded on the right; returns the padded outputs."""
    width = max(count)
    column = torch.arange(width)[None]
    pos = torch.where(column < torch.tensor(count)[:, None], column + torch.tensor(start)[:, None], -1)
    new = torch.stack([x[row, pos[row].clamp(min=0)] for row in range(len(count))])
    return mix(new, Step.of(pos), cache)


def token_by_token(mix: Mixer, spec: CachePolicy, x: Tensor, prompt: int) -> Tensor:
    """One row: its prompt in one call, then each token in a call of its own: what the policy means."""
    cache = open_cache(spec, mix, 1)
    out = [call(mix, cache, x, [0], [prompt])]
    cache.commit()
    for at in range(prompt, x.shape[1]):
        out.append(call(mix, cache, x, [at], [1]))
        cache.commit()
    return torch.cat(out, 1)[0]
