"""Rotations that spread outliers over all channels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.numerics.hadamard import hadamard, random_signs, supported
from zoo.components.registry import part
from zoo.quantize.contracts import Transform, Turning


@part(Transform, "rotation", source="Ashkboos et al. 2024 (QuaRot), arXiv:2404.00456, section 4; what needs no new operator of it")
@dataclass(frozen=True, kw_only=True)
class Rotation(Turning):
    """A randomized Hadamard matrix turns the residual stream, a Hadamard matrix the value of each head.

    residual, heads: which of the two. block: the stream is turned in blocks of so many channels (32 for MX formats), None: as a
    whole. seed: of the random signs. Widths for which no Hadamard matrix is known take a random orthogonal matrix.
    """

    residual: bool = True
    heads: bool = True
    block: int | None = None
    seed: int = 0

    def problems(self) -> Iterator[tuple[str, str]]:
        if not (self.residual or self.heads):
            yield "residual", "with neither the residual stream nor heads there is nothing to rotate"
        if self.block is not None and self.block < 2:
            yield "block", f"must be at least 2, got {self.block}"

    def stream(self, width: int) -> Tensor | None:
        if not self.residual:
            return None
        if self.block is not None and width % self.block:
            raise ValueError(f"rotation: {width} channels do not divide into blocks of {self.block}")
        generator = torch.Generator().manual_seed(self.seed)
        signs = random_signs(width, generator).double()
        block = orthonormal(self.block or width, generator)
        return signs[:, None] * torch.block_diag(*[block] * (width // len(block)))

    def head(self, width: int) -> Tensor | None:
        return orthonormal(width, torch.Generator().manual_seed(self.seed)) if self.heads else None


def orthonormal(size: int, generator: torch.Generator) -> Tensor:
    """[size, size] float64: a Hadamard matrix where one is known, else a random one (QR of Gaussian numbers)."""
    if supported(size):
        return hadamard(size, torch.float64)
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    return q * r.diagonal().sign()
