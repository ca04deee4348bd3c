"""Multi-head latent attention (MLA): one small latent per token stands for the keys and values of all heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Projection, ProjectionModule, attach
from zoo.components.projection._latent import LatentBase, LatentModule
from zoo.components.registry import part
from zoo.components.spec import Child


@part(
    Projection,
    "latent",
    source="DeepSeek-AI 2024 (DeepSeek-V2), arXiv:2405.04434, section 2.1",
    example={"heads": 4, "nope": 6, "rope": 4, "value": 8, "rank": 12, "q_rank": 10},
)
@dataclass(frozen=True, kw_only=True)
class Latent(LatentBase):
    """Keys and values are up-projections of one cached latent: rank + rope numbers per token, whatever the number of heads.

    One latent and one rotated key serve every head. Fields: see LatentBase.
    """

    @property
    def latent_count(self) -> int:
        return 1

    def children(self, width: int) -> dict[str, Child]:
        latent = {
            "kv_norm": Child(self.latent_norm, (self.rank,)),
            "kv_up": Child(self.kv_up, (self.rank, self.heads * (self.nope + self.value), False)),
        }
        return self.query_children(width) | self.outer_children(width) | latent

    def build(self, width: int) -> ProjectionModule:
        return LatentProjection(self, width)


class LatentProjection(LatentModule):
    kv_norm: nn.Module
    kv_up: nn.Module

    def __init__(self, spec: Latent, width: int):
        super().__init__(spec)
        attach(self, spec.children(width))

    def normed(self, c: Tensor) -> Tensor:
        return self.kv_norm(c)

    def expand(self, c: Tensor) -> Tensor:
        return self.kv_up(c[:, :, 0]).unflatten(-1, (self.spec.heads, -1))

    def up_weight(self, dtype: torch.dtype) -> Tensor:
        weight: Tensor = self.kv_up.dense_weight(dtype)  # pyright: ignore[reportCallIssue]
        return weight.unflatten(0, (self.spec.heads, -1))
