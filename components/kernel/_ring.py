"""What the ring kernels share: positions of all processes, and the operands of the block that is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zoo.components.contracts import Ask, Kernel, Operands, Pattern, PositionModule, Projection, Step, View
from zoo.components.kernel._softmax import heads_last, scene
from zoo.components.ops.attention import Scene
from zoo.components.ops.ring import Ring
from zoo.components.spec import Child, default

Attend = Callable[[Tensor, Tensor, Tensor, Ring, Callable, Callable], Tensor]


@dataclass(frozen=True, kw_only=True)
class RingBase(Kernel):
    """Fields of the ring kernels. inner: the kernel for one block of keys; it must return its log-sum-exp (``Kernel.lse``)."""

    inner: Kernel = default(Kernel, "flash_v2")
    graph_safe = False

    def at_layer(self, index: int) -> Kernel:
        return replace(self, inner=self.inner.at_layer(index))

    def problems(self, projection: Projection) -> Iterator[tuple[str, str]]:
        if not self.inner.lse:
            yield "inner", f"{self.inner.name} does not return the log-sum-exp that blocks are merged by; use flash_v2 or online"

    def refuses(self, ask: Ask) -> list[str]:
        return list(dict.fromkeys(super().refuses(ask) + self.inner.refuses(ask)))

    def children(self, projection: Projection) -> dict[str, Child]:
        return {"inner": Child(self.inner, (projection,))}


class RingModule(nn.Module):
    """Each process calls it with its own tokens at their true positions, in any order.

    ring: the processes among which the sequence is spread; a ring of one until ``join``.
    """

    inner: Any  # a module with ``attend``

    def __init__(self, inner: nn.Module, attend: Attend):
        super().__init__()
        self.inner, self.attend, self.ring = inner, attend, Ring()

    def join(self, group: ProcessGroup) -> None:
        """Spread over ``group`` from now on; every process of it must make the same calls in the same order."""
        self.ring = Ring(group)

    def forward(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
        length, views, steps = step.once(f"ring {view.key} {id(self.ring.group)}", lambda: self.blocks(view, step))
        q = a.q.unflatten(2, (a.k.shape[2], -1)).permute(0, 2, 3, 1, 4)
        k, v = (F.pad(x, (0, 0, 0, 0, 0, length - x.shape[1])).transpose(1, 2)[:, :, None] for x in (a.k, a.v))

        def scene_of(q: Tensor, k: Tensor, v: Tensor, rank: int) -> Scene:
            return replace(scene(a, views[rank], steps[rank], pattern, position), q=q, k=k, v=v)

        return heads_last(self.attend(q, k, v, self.ring, scene_of, self.inner.attend), a.v)

    def blocks(self, view: View, step: Step) -> tuple[int, list[View], list[Step]]:
        """The common number of keys, and for each process what its keys look like; once per call, for all layers."""
        length = self.ring.longest(view.kpos.shape[1], view.kpos.device)
        fill = (0, length - view.kpos.shape[1])
        kpos = self.ring.gather(F.pad(view.kpos, fill, value=-1))
        segment = [None] * self.ring.size if view.ksegment is None else self.ring.gather(F.pad(view.ksegment, fill, value=-1))
        views = [View({}, p, ksegment=s, group=view.group) for p, s in zip(kpos, segment, strict=True)]
        return length, views, [replace(step, _memo={}) for _ in views]  # a memo for each, or masks of one shape would be taken for one
