"""A feed-forward part without a gate becomes a mixture of its copies (sparse upcycling)."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.registry import part
from zoo.conversion import Conversion
from zoo.conversions.gated_to_moe import Upcycled


@part(Conversion, "plain_to_moe", source="Komatsuzaki et al. 2022, arXiv:2212.05055, section 3")
@dataclass(frozen=True, kw_only=True)
class PlainUpcycled(Upcycled):
    """``gated_to_moe`` for parts without a gate; exact until training."""
