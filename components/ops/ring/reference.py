"""Ring attention as it is written: one block of keys at a time, merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zoo.components.ops.attention import Scene
from zoo.components.ops.ring.exchange import Ring
from zoo.components.ops.softmax import Partial, merge

SceneOf = Callable[[Tensor, Tensor, Tensor, int], Scene]


def ring(q: Tensor, k: Tensor, v: Tensor, ring: Ring, scene_of: SceneOf, attend: Callable[[Scene], Partial]) -> Tensor:
    """q [B, G, R, T, D], k and v [B, G, 1, S, D or Dv] of this process -> o [B, G, R, T, Dv] over the keys of all.

    S must be the same everywhere. scene_of(q, k, v, rank): the scene for the keys that come from ``rank``. attend: any attention
    that returns its log-sum-exp. Liu, Zaharia, Abbeel 2023, arXiv:2310.01889, section 3.
    """
    parts = []
    for hop in range(ring.size):
        k, v = (k, v) if hop == 0 else ring.pass_on(k, v)
        parts.append(attend(scene_of(q, k, v, ring.source(hop))))
    return merge(parts).o
