"""Pointwise activations under the names that checkpoints use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]


def relu_squared(x: Tensor) -> Tensor:
    """So et al. 2021 (Primer), arXiv:2109.08668, section 3.1."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": relu_squared,
}
