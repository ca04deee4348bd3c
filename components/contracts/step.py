"""What one forward call tells every layer: where each token stands, and which tensors are kept between calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

X = TypeVar("X")


@dataclass(frozen=True)
class Slot:
    """One named tensor that a layer keeps between calls.

    token: one entry of ``shape`` per token, can be cut back; state: one tensor of ``shape`` per row, only replaced.
    dtype None follows the model. window: a fact that caches may use, only the last ``window`` positions are ever read again.
    """

    kind: Literal["token", "state"]
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    window: int | None = None

    def bytes(self, element_bytes: int) -> int:
        """element_bytes: of the model's dtype."""
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype else element_bytes)


@dataclass
class Step:
    """One forward call, shared by all layers.

    pos: [B, T] int64 absolute positions, -1 marks padding.
    start: where it is an int, the host knows that every row holds positions start .. start+T-1 and nothing is padding; fast
    kernels use that fact instead of a mask. None: look at ``pos``.
    segment: [B, T] int64 number of each token's document, -1 in none; None where rows are not packed. Patterns look at it.
    axes: [B, T, A] coordinates (row and column of a patch; time, row and column) that rotations over several axes turn by, -1 turns
    by nothing; None: each of them is ``pos``. ``pos`` remains the order that patterns and caches look at.
    inputs: what the model was called with, for heads that look for a token by its id; None where a step was made without a model.
    """

    pos: Tensor
    start: int | None = None
    segment: Tensor | None = None
    axes: Tensor | None = None
    inputs: Tensor | None = None
    _memo: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, pos: Tensor, segment: Tensor | None = None, axes: Tensor | None = None) -> Step:
        """A step from positions alone; reads them once on the host to learn whether the batch is plain."""
        first = int(pos[0, 0]) if pos.numel() else -1
        plain = first >= 0 and torch.equal(pos, (first + torch.arange(pos.shape[1], device=pos.device)).expand_as(pos))
        return cls(pos, first if plain else None, segment, axes)

    @classmethod
    def plain(cls, start: int, batch: int, length: int, device: torch.device | str | None = None) -> Step:
        """Every row holds positions start .. start+length-1."""
        return cls(torch.arange(start, start + length, device=device).expand(batch, -1), start)

    def to(self, device: torch.device) -> Step:
        """The same call on another device, moved once for all layers there; what those share is their own."""
        return self if self.pos.device == device else self.once(f"on {device}", lambda: self._moved(device))

    def _moved(self, device: torch.device) -> Step:
        segment, axes, inputs = (None if x is None else x.to(device) for x in (self.segment, self.axes, self.inputs))
        return Step(self.pos.to(device), self.start, segment, axes, inputs)

    @property
    def valid(self) -> Tensor:
        """[B, T] bool, False on padding."""
        return self.once("valid", lambda: self.pos >= 0)

    def coordinates(self, count: int) -> Tensor:
        """[B, T, count], what rotations over ``count`` axes turn by. Raises ValueError where the call has another number of axes."""
        if self.axes is None:
            return self.pos[..., None].expand(*self.pos.shape, count)
        if self.axes.shape[-1] != count:
            raise ValueError(f"the position encoding turns by {count} axes, the call's tokens have {self.axes.shape[-1]}")
        return self.axes

    def once(self, key: str, make: Callable[[], X]) -> X:
        """``make()``, computed by the first layer that asks and shared by the others of this call."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]
