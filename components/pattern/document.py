"""Documents packed into one row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.contracts import Pattern, Tokens
from zoo.components.registry import part


@part(Pattern, "document", source="Raffel et al. 2019, arXiv:1910.10683, section 3.1.1 (packing); Krell et al. 2021, arXiv:2107.02027")
@dataclass(frozen=True, kw_only=True)
class Document(Pattern):
    """A token sees its own document (``Step.segment``), in both directions; compose ``all_of: [causal, document]`` for text.

    Tokens of segment -1 belong to no document. A step without segments is one document a row. Positions may restart in each
    document or run on: only the segment counts. Raises ValueError with a cache that does not keep segments.
    """

    segmented = True
    separates = True

    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        return torch.ones_like(qpos - kpos, dtype=torch.bool)

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        if q.segment is None:
            return self.see(q.pos, k.pos)
        if k.segment is None:
            raise ValueError("pattern document: this cache keeps no documents; give packed rows to a model without a cache")
        return (q.segment == k.segment) & (k.segment >= 0)
