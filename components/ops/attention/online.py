"""One pass over the keys for all queries at once."""

from __future__ import annotations

from zoo.components.ops.attention.reference import Scene
from zoo.components.ops.softmax import Partial, Running


def online(scene: Scene, block: int) -> Partial:
    """Keys in blocks of ``block``; memory T * block instead of T * S.

    Source: Rabe and Staats 2021, arXiv:2112.05682; online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    run = Running.start(scene.q, scene.v.shape[-1])
    for part in scene.column_blocks(block):
        run = run.add(part.logits(), part.v)
    return run.end()
