"""What specs reckon with before anything is built: the tensors that parts will hold, and calls."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that a part will hold: shape, and its dtype where that does not follow the model's (a torch dtype name)."""

    shape: tuple[int, ...]
    dtype: str | None = None

    def bytes(self, element_bytes: int) -> int:
        """element_bytes: of the model's dtype."""
        import torch

        return math.prod(self.shape) * (getattr(torch, self.dtype).itemsize if self.dtype else element_bytes)


@dataclass(frozen=True)
class Call:
    """One row's call: ``new`` tokens after ``past`` ones that are kept; means over calls need not be whole.

    shown: (query, key) pairs that the layer's pattern lets through, None for all of them.
    """

    new: float = 1
    past: float = 0
    shown: float | None = None

    @property
    def visible(self) -> float:
        """Tokens that are there to be seen, the new ones included."""
        return self.past + self.new

    @property
    def pairs(self) -> float:
        return self.new * self.visible if self.shown is None else self.shown

    def tokens(self, count: float) -> Call:
        """The cost of a part that runs on ``count`` vectors instead of the new tokens."""
        return replace(self, new=count)
