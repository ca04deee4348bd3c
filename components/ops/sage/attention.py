"""SageAttention 1, 2, 2++ and 3: which operand is rounded how. Shapes as in ``ops.attention.Scene``.

All of them subtract from k its mean over the tokens, which shifts each row of logits by a constant that softmax does not see. What
no query sees counts as 0, so padding moves no mean and no scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zoo.components.ops.attention import Scene
from zoo.components.ops.sage.formats import E4M3_MAX, Coded, e4m3, fp16, fp22, integers, logits, microscaled, microscaled_weights
from zoo.components.ops.softmax import Running, wide

Round = Callable[[Tensor], Tensor]
QUERIES, KEYS = 128, 64  # tokens of a tile
V_TOP_PP = 2.25  # 448 * 2.25 * 64 products stay below the 65504 of fp16 (arXiv:2505.21136, section 3)
P_LEVELS = E4M3_MAX * 6  # the span of an E4M3 scale times an E2M1 code


def sage1(scene: Scene) -> Tensor:
    """q and k int8 with a scale per tile, p and v fp16 with an fp16 accumulator. Zhang et al. 2024, arXiv:2410.02367."""
    q, k, v = _cleaned(scene)
    s = logits(integers(q, 127, (QUERIES,)), integers(_centered(k, scene), 127, (KEYS,)))
    return _weighted(scene, s, fp16(v), lambda p, v: _summed(fp16(p), v, 16, fp16))


def sage2(scene: Scene, bits: int) -> Tensor:
    """q and k int4 or int8 with a scale per GPU thread, q smoothed per tile, p and v FP8 with an FP22 accumulator that is emptied
    into fp32 after each tile. Zhang et al. 2024, arXiv:2411.10958.
    """
    s, v = _per_thread(scene, bits)
    scale = _channel_scale(v, E4M3_MAX)
    o = _weighted(scene, s, e4m3(v / scale), lambda p, v: _summed(e4m3(p * E4M3_MAX), v, 32, fp22) / E4M3_MAX)
    return o * scale


def sage2pp(scene: Scene, bits: int) -> Tensor:
    """As sage2 with the faster FP8 product that accumulates in fp16; v spans only 2.25 so that 64 products cannot overflow.
    Zhang et al. 2025, arXiv:2505.21136.
    """
    s, v = _per_thread(scene, bits)
    scale = _channel_scale(v, V_TOP_PP)
    o = _weighted(scene, s, e4m3(v / scale), lambda p, v: _summed(e4m3(p * E4M3_MAX), v, 32, fp16) / E4M3_MAX)
    return o * scale


def sage3(scene: Scene) -> Tensor:
    """q, k, v and p in FP4 with an E4M3 scale per 16 values; p is first stretched to the whole span of scale times code.
    Zhang et al. 2025, arXiv:2505.11594, sections 3.1 and 3.2.
    """
    q, k, v = _cleaned(scene)
    k = _centered(k, scene)
    smooth, mean = _smoothed(q, scene)
    s = microscaled(smooth) @ microscaled(k).mT + mean @ k.mT

    def weighted(p: Tensor, v: Tensor) -> Tensor:
        return microscaled_weights(p * P_LEVELS) @ microscaled(v.mT).mT / P_LEVELS

    return _weighted(scene, s, v, weighted, QUERIES)


def _per_thread(scene: Scene, bits: int) -> tuple[Tensor, Tensor]:
    """Logits from per-thread integers, and the cleaned v.

    A thread of the tensor-core product holds every eighth query of 32, and the keys 2t and 2t + 1 of every eight of 64
    (arXiv:2411.10958, section 3.2, figure 4). The mean of q that smoothing took off comes back through k as it was.
    """
    q, k, v = _cleaned(scene)
    k, top = _centered(k, scene), 2 ** (bits - 1) - 1
    smooth, mean = _smoothed(q, scene)
    keys: Coded = integers(k, top, (KEYS // 8, 4, 2), own=(1,))
    return logits(integers(smooth, top, (4, 8), own=(1,)), keys) + mean @ k.mT, v


def _cleaned(scene: Scene) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, 0 where a query sees nothing and where no query sees a key."""
    query, key = scene.keep.any(-1)[..., None], scene.keep.any(-2)[..., None]
    return wide(scene.q) * query, wide(scene.k) * key, wide(scene.v) * key


def _centered(k: Tensor, scene: Scene) -> Tensor:
    there = scene.keep.any(-2)[..., None]
    return (k - k.sum(-2, keepdim=True) / there.sum(-2, keepdim=True).clamp(min=1)) * there


def _smoothed(q: Tensor, scene: Scene) -> tuple[Tensor, Tensor]:
    """q less the mean of its tile, and that mean, each [B, G, R, T, D]."""
    there = scene.keep.any(-1)[..., None].expand(*q.shape[:-1], 1)
    tiles = zip(q.split(QUERIES, -2), there.split(QUERIES, -2), strict=True)
    means = [(t.sum(-2, keepdim=True) / n.sum(-2, keepdim=True).clamp(min=1)).expand_as(t) for t, n in tiles]
    mean = torch.cat(means, -2) * there
    return q - mean, mean


def _channel_scale(v: Tensor, top: float) -> Tensor:
    """[B, G, 1, 1, Dv]: the largest magnitude of each channel / top."""
    scale = v.detach().abs().amax(-2, keepdim=True) / top
    return scale.masked_fill(scale == 0, 1)


def _summed(p: Tensor, v: Tensor, step: int, cast: Round) -> Tensor:
    """p @ v, ``step`` keys per tensor-core product, the accumulator rounded by ``cast`` after each."""
    o = torch.zeros_like(p[..., :1] * v[..., :1, :])
    for part, values in zip(p.split(step, -1), v.split(step, -2), strict=True):
        o = cast(o + part @ values)
    return o


def _weighted(scene: Scene, s: Tensor, v: Tensor, product: Callable[[Tensor, Tensor], Tensor], keys: int = KEYS) -> Tensor:
    """softmax(s * scale + bias) v over tiles of keys, each p relative to the maximum so far, as the kernels see it."""
    s = s * scene.scale
    s = (s if scene.bias is None else s + scene.bias).masked_fill(~scene.keep, -torch.inf)
    run = Running.start(scene.q, v.shape[-1])
    for part, values in zip(s.split(keys, -1), v.split(keys, -2), strict=True):
        run = run.add(part, values, product)
    return run.end().o
