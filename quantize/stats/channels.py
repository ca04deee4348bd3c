"""The size of activations, channel by channel."""

from __future__ import annotations

import torch
from torch import Tensor


class ChannelSizes:
    """largest, mean: of |x| over all tokens seen, [channels] float32. tokens: how many."""

    def __init__(self, channels: int, device: torch.device | str = "cpu"):
        self.tokens = 0
        self.largest, self.mean = torch.zeros(channels, device=device), torch.zeros(channels, device=device)

    def update(self, x: Tensor) -> None:
        """Add the tokens of x [..., channels]."""
        size = x.detach().reshape(-1, x.shape[-1]).to(self.mean).abs()
        if not len(size):
            return
        self.tokens += len(size)
        self.largest = torch.maximum(self.largest, size.amax(0))
        self.mean += (size.mean(0) - self.mean) * (len(size) / self.tokens)
