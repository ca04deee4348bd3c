"""Delayed scaling: the scale of a training step from the largest magnitudes of the steps before it, so that no pass waits for its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.numerics.floats import Element


@dataclass(frozen=True)
class AmaxHistory:
    """The largest magnitudes of the last steps, newest first: [length] float32, 0 where there was none yet.

    Micikevicius et al. 2022, arXiv:2209.05433, section 3.3; the window and the margin are those of Transformer Engine.
    """

    window: Tensor

    @classmethod
    def start(cls, length: int, device: torch.device | str = "cpu") -> AmaxHistory:
        return cls(torch.zeros(length, device=device))

    def after(self, x: Tensor) -> AmaxHistory:
        """The history once a step has seen x. Infinity and NaN, of a step that is skipped, leave the maximum as it was."""
        newest = x.detach().float().abs().amax().reshape(1)
        newest = newest.where(newest.isfinite(), 0)
        return AmaxHistory(torch.cat((newest, self.window[:-1])))

    def scale(self, element: Element, margin: int = 0) -> Tensor:
        """What numbers of the next step are to be multiplied with once decoded, a scalar; 1 while nothing was seen.

        margin: powers of two of room above the largest magnitude seen.
        """
        scale = self.window.amax() * 2.0**margin / element.largest
        return scale.where(scale > 0, 1)
