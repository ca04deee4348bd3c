"""Random tensors that are the same in every run and do not touch the global generator."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def randomise(module: M, seed: int = 0) -> M:
    """Every floating-point parameter and buffer becomes random (variances stay positive): initial values hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for name, x in module.state_dict().items():
        if x.is_floating_point():
            new = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            x.copy_(new.abs() + 0.5 if name.endswith("var") else new)
    return module
