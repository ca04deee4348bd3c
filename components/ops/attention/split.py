"""Attention of few queries over many keys: the keys are cut into parts that are computed side by side and then combined."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.ops.attention.reference import Scene, attention
from zoo.components.ops.softmax import Partial, merge
from zoo.components.ops.softmax.running import divided, log_sum, product


def split(scene: Scene, parts: int) -> Partial:
    """Each part gives (o, lse), merged by log-sum-exp. Source: Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding"."""
    x, v = _parted(scene, parts)
    top = x.detach().amax(-1, keepdim=True)
    exps = (x - top.masked_fill(top == -torch.inf, 0)).exp()  # [B, G, R, parts, T, S / parts]
    total = exps.sum(-1)
    o, lse = divided(product(exps, v), total), log_sum(total, top[..., 0].masked_fill(total == 0, 0))
    return merge([Partial(*part) for part in zip(o.unbind(-3), lse.unbind(-2), strict=True)])


def split_unified(scene: Scene, parts: int, center: float, reach: float) -> Tensor:
    """Every part subtracts the same number ``center`` instead of its maximum, so parts are just added and none waits for another.

    A row whose largest logit is further than ``reach`` from the center could overflow or lose its digits; if there is one, the
    call is computed again with maxima and such rows take that result. Reads one bool from the device.
    Source: Hong et al. 2023, arXiv:2311.01282 (FlashDecoding++), section 3.
    """
    x, v = _parted(scene, parts)
    top = x.detach().amax((-3, -1))  # [B, G, R, T]
    far = ((top - center).abs() > reach) & (top > -torch.inf)
    exps = (x - center).masked_fill(far[..., None, :, None], -torch.inf).exp()
    total = exps.sum((-3, -1))
    o = divided(product(exps, v).sum(-3), total)
    return torch.where(far[..., None], attention(scene), o) if bool(far.any()) else o


def _parted(scene: Scene, parts: int) -> tuple[Tensor, Tensor]:
    """Logits [B, G, R, parts, T, S / parts] and values [B, G, 1, parts, S / parts, Dv]; what is filled up is not seen."""
    size = -(-scene.k.shape[-2] // parts)
    fill = parts * size - scene.k.shape[-2]
    x = F.pad(scene.logits(), (0, fill), value=-torch.inf).unflatten(-1, (parts, size)).transpose(-3, -2)
    return x, F.pad(scene.v, (0, 0, 0, fill)).unflatten(-2, (parts, size))
