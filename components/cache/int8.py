"""Kept tokens in 8-bit integers."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.cache._coded import Eight
from zoo.components.contracts import CachePolicy
from zoo.components.numerics.kv import Int8
from zoo.components.registry import part


@part(CachePolicy, "int8", source="the int8_per_token_head cache of vLLM")
@dataclass(frozen=True, kw_only=True)
class Int8Cache(Eight):
    """8-bit integers with one scale for each token and head (for a latent, for each token), or with ``scales`` found by calibration."""

    codes = Int8
