"""Fixed sines and cosines of the position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from zoo.components.contracts import PositionEmbedding, Step
from zoo.components.registry import part


@part(PositionEmbedding, "sinusoidal", source="Vaswani et al. 2017, arXiv:1706.03762, section 3.5; closed: tensor2tensor, Whisper")
@dataclass(frozen=True, kw_only=True)
class Sinusoidal(PositionEmbedding):
    """Adds sines and cosines of the position at geometric frequencies from 1 down to 1/theta.

    layout: ``interleaved`` alternates sine and cosine (the paper), ``half`` has all sines first. closed: whether the last frequency
    is 1/theta itself (tensor2tensor, fairseq, Whisper) or would be the next one (the paper).
    """

    theta: float = 10_000.0
    layout: Literal["interleaved", "half"] = "interleaved"
    closed: bool = False

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        if width % 2 or width < 4:
            yield "", f"pairs of sine and cosine need an even width of at least 4, got {width}"
        if self.theta <= 0:
            yield "theta", f"must be positive, got {self.theta}"

    def build(self, width: int) -> nn.Module:
        return SinusoidalModule(self, width)


class SinusoidalModule(nn.Module):
    """(x [B, T, M], step) -> [B, T, M]. Holds no tensors: the table is made in fp32 for each call."""

    def __init__(self, spec: Sinusoidal, width: int):
        super().__init__()
        self.spec, self.width = spec, width

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return x + self.table(step.pos.clamp(min=0)).to(x.dtype)

    def table(self, pos: Tensor) -> Tensor:
        """[...] -> [..., width] fp32."""
        pairs = self.width // 2
        exponent = torch.arange(pairs, device=pos.device).float() / (pairs - 1 if self.spec.closed else pairs)
        angle = pos[..., None].float() * self.spec.theta**-exponent
        waves = torch.stack([angle.sin(), angle.cos()], -1 if self.spec.layout == "interleaved" else -2)
        return waves.flatten(-2)
