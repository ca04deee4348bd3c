"""A dense feed-forward part becomes a mixture of its copies (sparse upcycling)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from zoo.components.mlp.moe import MoE
from zoo.components.registry import part
from zoo.components.router.top_k import TopK
from zoo.conversion import Conversion, ConversionError, Converted, Work, unpacked
from zoo.model import LayerSpec

STD = 0.02  # of the router's weights; the choice of experts starts out nearly even


@part(Conversion, "gated_to_moe", source="Komatsuzaki et al. 2022, arXiv:2212.05055, section 3")
@dataclass(frozen=True, kw_only=True)
class Upcycled(Conversion):
    """Every expert starts as a copy of the dense part and the chosen ones' weights sum to 1, so nothing changes until training.

    seed: of the router's random weights, which differ from layer to layer.
    """

    place = "mlp"

    experts: int = 8
    k: int = 2
    seed: int = 0

    def target(self, site: LayerSpec, width: int) -> LayerSpec:
        if not 1 <= self.k <= self.experts:
            raise ConversionError(f"k: must lie in 1..{self.experts} (experts), got {self.k}")
        return dataclasses.replace(site, mlp=MoE(router=TopK(k=self.k), experts=(unpacked(site.mlp),) * self.experts))

    def convert(self, work: Work) -> Converted:
        dense = {name.removeprefix("mlp."): tensor for name, tensor in work.held.items() if name.startswith("mlp.")}
        made = {f"mlp.experts.{i}.{name}": tensor.clone() for i in range(self.experts) for name, tensor in dense.items()}
        width = work.held["mlp.up.weight"].shape[1]
        generator = torch.Generator().manual_seed(self.seed + int(work.path.removeprefix("layers.")))
        router = STD * torch.randn(self.experts, width, generator=generator)
        return Converted(made | {"mlp.router.weight": router.to(dense["up.weight"].device)}, exact=True)
