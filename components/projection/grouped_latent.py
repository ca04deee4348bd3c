"""Grouped latent attention: several latents per token, each for its own group of heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Projection, ProjectionModule, attach
from zoo.components.projection._latent import LatentBase, LatentModule
from zoo.components.registry import part
from zoo.components.spec import Child


@part(
    Projection,
    "grouped_latent",
    source="Zadouri et al. 2025, arXiv:2505.21487, section 3",
    example={"heads": 4, "latents": 2, "nope": 6, "rope": 4, "value": 8, "rank": 8},
)
@dataclass(frozen=True, kw_only=True)
class GroupedLatent(LatentBase):
    """``latents`` cached latents of width ``rank``, each with its own norm and up-projection for heads / latents heads.

    Latents can be split over devices, which the single latent of MLA cannot. One rotated key serves every head. Other fields: see
    LatentBase.
    """

    latents: int

    @property
    def latent_count(self) -> int:
        return self.latents

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        yield from super().problems(width)
        if self.latents < 1 or self.heads % self.latents:
            yield "latents", f"heads ({self.heads}) must be a multiple of latents ({self.latents})"

    def latent_children(self, index: int) -> dict[str, Child]:
        width = self.heads // self.latents * (self.nope + self.value)
        return {
            f"kv_norm.{index}": Child(self.latent_norm, (self.rank,)),
            f"kv_up.{index}": Child(self.kv_up, (self.rank, width, False)),
        }

    def children(self, width: int) -> dict[str, Child]:
        groups = {name: child for i in range(self.latents) for name, child in self.latent_children(i).items()}
        return self.query_children(width) | self.outer_children(width) | groups

    def build(self, width: int) -> ProjectionModule:
        return GroupedLatentProjection(self, width)


class GroupedLatentProjection(LatentModule):
    def __init__(self, spec: GroupedLatent, width: int):
        super().__init__(spec)
        attach(self, spec.query_children(width) | spec.outer_children(width))
        groups = [spec.latent_children(i) for i in range(spec.latents)]
        self.kv_norm = nn.ModuleList(g[f"kv_norm.{i}"].build() for i, g in enumerate(groups))
        self.kv_up = nn.ModuleList(g[f"kv_up.{i}"].build() for i, g in enumerate(groups))

    def normed(self, c: Tensor) -> Tensor:
        return torch.stack([norm(part) for norm, part in zip(self.kv_norm, c.unbind(2), strict=True)], 2)

    def expand(self, c: Tensor) -> Tensor:
        kv = torch.cat([up(part) for up, part in zip(self.kv_up, c.unbind(2), strict=True)], -1)
        return kv.unflatten(-1, (self.spec.heads, -1))

    def up_weight(self, dtype: torch.dtype) -> Tensor:
        weight = torch.cat([up.dense_weight(dtype) for up in self.kv_up])  # pyright: ignore[reportCallIssue]
        return weight.unflatten(0, (self.spec.heads, -1))
