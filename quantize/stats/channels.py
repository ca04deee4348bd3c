"""The size of activations, channel by channel."""

from __future__ import annotations

from collections.abc import Callable

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

    @property
    def width(self) -> int:
        """Channels."""
        return len(self.largest)

    @property
    def finite(self) -> bool:
        """Whether all activations were."""
        return bool(self.largest.isfinite().all())

    def pooled(self, tokens: int, total: Callable[[Tensor], Tensor], most: Callable[[Tensor], Tensor]) -> ChannelSizes:
        """Those of several processes' tokens, ``tokens`` in all. total, most: sum a tensor, or take its maximum, over them in place."""
        result = ChannelSizes(0, self.largest.device)
        result.tokens = tokens
        result.largest = most(self.largest.clone())
        result.mean = total(self.mean * (self.tokens / max(tokens, 1)))
        return result
