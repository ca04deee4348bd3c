"""Passing tensors round a ring of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ring:
    """The processes of a group in their order; with group None a ring of one, which needs no torch.distributed."""

    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def source(self, hop: int) -> int:
        """Whose block is here after ``hop`` shifts."""
        return (self.rank - hop) % self.size

    def shift(self, tensors: Sequence[Tensor], by: int = 1) -> list[Tensor]:
        """Send to the process ``by`` further on and receive as much from the one that far back; shapes must agree between them."""
        if self.group is None or self.size == 1:
            return list(tensors)
        sent = [x.contiguous() for x in tensors]
        received = [torch.empty_like(x) for x in sent]
        to, origin = (dist.get_global_rank(self.group, (self.rank + d) % self.size) for d in (by, -by))
        ops = [dist.P2POp(dist.isend, x, to, self.group) for x in sent] + [dist.P2POp(dist.irecv, x, origin, self.group) for x in received]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return received

    def pass_on(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``shift`` with gradients, which go the other way."""
        return (k, v) if self.size == 1 else Shifted.apply(self, k, v)  # pyright: ignore[reportReturnType]

    def longest(self, length: int, device: torch.device) -> int:
        """The largest ``length`` of any process."""
        if self.group is None or self.size == 1:
            return length
        most = torch.tensor(length, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        return int(most)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Everyone's ``x``, by rank; shapes must agree."""
        if self.group is None or self.size == 1:
            return [x]
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(found, x.contiguous(), self.group)
        return found


class Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ring = ring
        return tuple(ring.shift(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.ring.shift(grads, -1)
