"""Image patches as tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Embed, Linear, Norm, PositionEmbedding, Step, attach
from zoo.components.registry import part
from zoo.components.spec import Child, TensorInfo, default


@part(
    Embed,
    "patches",
    source="Dosovitskiy et al. 2020 (ViT), arXiv:2010.11929, section 3.1; registers: Darcet et al. 2023, arXiv:2309.16588",
    example={"patch": 4, "registers": 2, "position": {"name": "learned_grid", "rows": 2, "columns": 2}},
)
@dataclass(frozen=True, kw_only=True)
class Patches(Embed):
    """Square patches of an image through one linear map, after a class token and register tokens.

    Inputs are pixels [B, channels, height, width] with room for one patch; what is left at the lower and right edge after the last
    whole patch is not seen, as a convolution with that stride leaves it. Tokens: class, registers, then patches row by row; their
    coordinates in ``Step.axes`` are row and column, -1 before the patches. position: what is added for the
    place, None for nothing (where rotations do it). norm: of the sum (CLIP), None for none. linear: a convolution's weight
    [M, channels, patch, patch], its last three dimensions flattened.
    """

    patch: int
    channels: int = 3
    bias: bool = True
    class_token: bool = True
    registers: int = 0
    position: PositionEmbedding | None = None
    norm: Norm | None = None
    linear: Linear = default(Linear, "dense")

    @property
    def prefix(self) -> int:
        """How many tokens come before the patches."""
        return int(self.class_token) + self.registers

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        for name, least in (("patch", 1), ("channels", 1), ("registers", 0)):
            if getattr(self, name) < least:
                yield name, f"must be at least {least}, got {getattr(self, name)}"

    def own_tensors(self, width: int) -> dict[str, TensorInfo]:
        return {"prefix": TensorInfo((self.prefix, width))} if self.prefix else {}

    def children(self, width: int) -> dict[str, Child]:
        optional = {n: Child(spec, (width,)) for n, spec in (("position", self.position), ("norm", self.norm)) if spec is not None}
        return {"linear": Child(self.linear, (self.channels * self.patch**2, width, self.bias)), **optional}

    def size(self, inputs: Tensor) -> tuple[int, int]:
        if inputs.dim() != 4 or inputs.shape[1] != self.channels or not inputs.is_floating_point():
            raise ValueError(f"input must be pixels [batch, {self.channels}, height, width], got {list(inputs.shape)} {inputs.dtype}")
        rows, columns = self.grid(inputs)
        return inputs.shape[0], self.prefix + rows * columns

    def grid(self, inputs: Tensor) -> tuple[int, int]:
        """Rows and columns of whole patches. Raises ValueError for an image smaller than one."""
        height, width = inputs.shape[2:]
        if min(height, width) < self.patch:
            raise ValueError(f"sides of an image must be at least the patch size {self.patch}, got {height} x {width}; resize or pad it")
        return height // self.patch, width // self.patch

    def draw(self, tokens: int, generator: torch.Generator) -> Tensor:
        return torch.randn(1, self.channels, self.patch, self.patch * tokens, generator=generator)

    def axes(self, inputs: Tensor) -> Tensor:
        places = torch.cartesian_prod(*(torch.arange(n, device=inputs.device) for n in self.grid(inputs)))
        return torch.cat([places.new_full((self.prefix, 2), -1), places]).expand(inputs.shape[0], -1, -1)

    def build(self, width: int) -> nn.Module:
        return PatchEmbedding(self, width)


class PatchEmbedding(nn.Module):
    """(pixels [B, C, height, width] of any float type, step) -> [B, T, M] in the weights' type. prefix: [class and registers, M]."""

    linear: nn.Module
    position: nn.Module | None
    norm: nn.Module | None

    def __init__(self, spec: Patches, width: int):
        super().__init__()
        self.spec, self.position, self.norm = spec, None, None
        self.prefix = nn.Parameter(torch.randn(spec.prefix, width) * 0.02) if spec.prefix else None
        attach(self, spec.children(width))

    def forward(self, pixels: Tensor, step: Step) -> Tensor:
        side = self.spec.patch
        kind = next((p.dtype for p in self.parameters() if p.is_floating_point()), pixels.dtype)
        rows, columns = self.spec.grid(pixels)
        whole = pixels[..., : rows * side, : columns * side].to(kind)
        cut = whole.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # [B, C, rows, side, columns, side]
        x = self.linear(cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))
        if self.prefix is not None:
            x = torch.cat([self.prefix.expand(len(x), -1, -1), x], 1)
        if self.position is not None:
            x = self.position(x, step)
        return x if self.norm is None else self.norm(x)
