"""What softmax kernels share: operands grouped by key/value head, so that keys and values are never repeated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.components.contracts import Operands, Pattern, PositionModule, Step, View
from zoo.components.ops.attention import Scene
from zoo.components.ops.softmax import Partial


def scene(a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Scene:
    """The kernel's arguments as the attention ops take them."""
    groups = a.k.shape[2]
    q = a.q.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    k, v = a.k.transpose(1, 2)[:, :, None], a.v.transpose(1, 2)[:, :, None]
    bias = position.bias(step.pos, view.kpos)
    grouped = None if bias is None else bias.unflatten(1, (groups, -1))
    return Scene(q, k, v, a.scale * position.logit_scale, pattern.mask(step, view)[:, :, None], grouped)


def heads_last(o: Tensor, like: Tensor) -> Tensor:
    """[B, G, R, T, Dv] -> [B, T, H, Dv] in the dtype of ``like``."""
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3).to(like.dtype)


def in_order(pos: Tensor) -> Tensor:
    """[B, N] columns by position, padding last."""
    return pos.masked_fill(pos < 0, torch.iinfo(pos.dtype).max).argsort(dim=1, stable=True)


class SoftmaxKernel(nn.Module):
    """A kernel that is one of the attention ops, without parameters."""

    def __init__(self, attend: Callable[[Scene], Tensor | Partial]):
        super().__init__()
        self.attend = attend

    def forward(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
        found = self.attend(scene(a, view, step, pattern, position))
        return heads_last(found.o if isinstance(found, Partial) else found, a.v)
