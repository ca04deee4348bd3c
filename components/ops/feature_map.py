"""Maps of queries and keys before a linear kernel: what stands in for the exponential of softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

FeatureMap = Literal["identity", "elu_plus_one", "relu", "softmax", "l2"]


def identity(x: Tensor) -> Tensor:
    return x


def elu_plus_one(x: Tensor) -> Tensor:
    """Katharopoulos et al. 2020, arXiv:2006.16236, equation 7."""
    return F.elu(x) + 1


def softmax(x: Tensor) -> Tensor:
    """Over the channels: Shen et al. 2018, arXiv:1812.01243, section 3.2."""
    return x.softmax(-1)


def l2(x: Tensor) -> Tensor:
    """Unit length, with the epsilon under the root: Yang et al. 2024, arXiv:2406.06484, section 3.3."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": identity,
    "elu_plus_one": elu_plus_one,
    "relu": F.relu,
    "softmax": softmax,
    "l2": l2,
}
