"""Kept tokens in 4-bit codes."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.cache._coded import Coded
from zoo.components.contracts import CachePolicy
from zoo.components.numerics.kv import Spread
from zoo.components.registry import part


@part(CachePolicy, "int4", source="the int4_per_token_head cache of vLLM")
@dataclass(frozen=True, kw_only=True)
class Int4Cache(Coded):
    """4-bit codes with one scale and one least value for each token and head; for a latent, for each token."""

    @property
    def codec(self) -> Spread:
        return Spread(bits=4)
