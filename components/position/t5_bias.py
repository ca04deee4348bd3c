"""Learned biases by bucket of distance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Position, PositionModule
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Position, "t5_bias", source="Raffel et al. 2019 (T5), arXiv:1910.10683, section 2.1; Mesh TensorFlow's buckets")
@dataclass(frozen=True, kw_only=True)
class T5Bias(Position):
    """Adds a learned bias for each head and bucket of distances to the logits.

    Half of the buckets hold one distance each, the others grow logarithmically up to ``max_distance``, beyond which all is one.
    bidirectional: half of all buckets are for keys after the query (encoders); otherwise those count as distance 0 (decoders).
    """

    has_bias = True

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False

    def problems(self, width: int, heads: int) -> Iterator[tuple[str, str]]:
        if self.buckets < 4 or self.buckets % 4:
            yield "buckets", f"must be a multiple of 4, got {self.buckets}"
        if self.max_distance <= self.buckets // 2:
            yield "max_distance", f"must be beyond the {self.buckets // 2} buckets of single distances, got {self.max_distance}"

    def own_tensors(self, width: int, heads: int) -> dict[str, TensorInfo]:
        return {"weight": TensorInfo((self.buckets, heads))}

    def bucket(self, distance: Tensor) -> Tensor:
        """Key position minus query position, int64 -> bucket, int64 of the same shape."""
        one_way = self.buckets // 2 if self.bidirectional else self.buckets
        after = (distance > 0) * one_way if self.bidirectional else torch.zeros_like(distance)
        far = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        single = one_way // 2
        octave = torch.log(far.clamp(min=1).float() / single) / math.log(self.max_distance / single)
        shared = single + (octave * (one_way - single)).long()
        return after + torch.where(far < single, far, shared.clamp(max=one_way - 1))

    def build(self, width: int, heads: int) -> PositionModule:
        return T5BiasModule(self, heads)


class T5BiasModule(PositionModule):
    """weight: [buckets, H]. T5 learns one table for all layers: alias it where that is wanted."""

    def __init__(self, spec: T5Bias, heads: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.randn(spec.buckets, heads) * 0.1)

    def bias(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        """[B, H, T, S] in the table's dtype."""
        bucket = self.spec.bucket(kpos[:, None, :] - qpos[:, :, None])
        return F.embedding(bucket, self.weight).permute(0, 3, 1, 2)
