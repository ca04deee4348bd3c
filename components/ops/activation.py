"""Pointwise activations under the names that checkpoints use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "relu_squared", "sigmoid", "tanh", "identity"]


def relu_squared(x: Tensor) -> Tensor:
    """So et al. 2021 (Primer), arXiv:2109.08668, section 3.1."""
    return F.relu(x).square()


def gelu_sigmoid(x: Tensor) -> Tensor:
    """Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2: the cheaper approximation, ``quick_gelu`` in CLIP."""
    return x * torch.sigmoid(1.702 * x)


def identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_sigmoid": gelu_sigmoid,
    "relu": F.relu,
    "relu_squared": relu_squared,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": identity,
}
