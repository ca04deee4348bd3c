"""Kept tokens in fp8 (e4m3)."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.cache._coded import Eight
from zoo.components.contracts import CachePolicy
from zoo.components.numerics.kv import Float8
from zoo.components.registry import part


@part(CachePolicy, "fp8", source="the fp8_per_token_head cache of vLLM; e4m3: Micikevicius et al. 2022, arXiv:2209.05433")
@dataclass(frozen=True, kw_only=True)
class Float8Cache(Eight):
    """fp8 (e4m3) with one scale for each token and head (for a latent, for each token), or with ``scales`` found by calibration."""

    codes = Float8
