"""How kept keys, values and latents are stored: 8 and 4 bits per token and head, and KIVI's groups of tokens.

A codec works on vectors along the last dim. It names the tensors that stand for one vector (``layout``) and converts both ways.
What was once encoded is never encoded again, so a stored vector does not depend on what came before or after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from zoo.components.numerics.integer import pack, packed_size, unpack

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
F8_MAX = torch.finfo(torch.float8_e4m3fn).max


class Codec(Protocol):
    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Shape and dtype of each stored tensor for one token's entry of ``shape``."""
        ...

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """[..., *shape] -> the stored tensors, [..., *layout shape] each."""
        ...

    def decode(self, parts: Mapping[str, Tensor], width: int, dtype: torch.dtype) -> Tensor:
        """The inverse, up to rounding: -> [..., *shape] with last dim ``width``, in ``dtype``."""
        ...


@dataclass(frozen=True)
class _Eight:
    """Codes of 8 bits times an fp32 scale: each vector's own, max |x| / top, or one that is known before, beyond which values saturate."""

    scale: float | None = None

    kept: ClassVar[torch.dtype]  # of the codes
    top: ClassVar[float]

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        code = {"code": (shape, self.kept)}
        return code if self.scale is not None else code | {"scale": (shape[:-1], torch.float32)}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        if self.scale is not None:
            return {"code": self._codes(x.float() / self.scale)}
        scale = _largest(x) / self.top
        return {"code": self._codes(x.float() / scale), "scale": scale[..., 0]}

    def decode(self, parts: Mapping[str, Tensor], width: int, dtype: torch.dtype) -> Tensor:
        scale = parts["scale"][..., None] if self.scale is None else self.scale
        return (self._values(parts["code"]) * scale).to(dtype)

    def _codes(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _values(self, codes: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Int8(_Eight):
    """Symmetric int8, top 127."""

    kept, top = torch.int8, 127.0

    def _codes(self, x: Tensor) -> Tensor:
        return x.round().clamp(-127, 127).to(torch.int8)

    def _values(self, codes: Tensor) -> Tensor:
        return codes.float()


@dataclass(frozen=True)
class Float8(_Eight):
    """fp8 (e4m3fn), top 448. The codes are kept as bytes: few operators move fp8 tensors about."""

    kept, top = torch.uint8, F8_MAX

    def _codes(self, x: Tensor) -> Tensor:
        return x.clamp(-F8_MAX, F8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)

    def _values(self, codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Spread:
    """``bits``-bit codes spread evenly from the least to the greatest entry of each group: x = code * scale + low.

    group: entries that share a scale, None for the whole vector. Scale and low are fp16, as KIVI stores them; the codes are made
    with the rounded ones. Codes are packed densely into 32-bit words, first code in the lowest bits.
    """

    bits: int
    group: int | None = None

    def groups(self, width: int) -> int:
        return 1 if self.group is None else math.ceil(width / self.group)

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        *lead, width = shape
        scales = ((*lead, self.groups(width)), torch.float16)
        return {"code": ((*lead, packed_size(width, self.bits)), torch.int32), "scale": scales, "low": scales}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        width = x.shape[-1]
        grouped = self._split(x.float())
        low, high = grouped.aminmax(dim=-1, keepdim=True)
        low = low.half()
        scale = ((high - low.float()) / (2**self.bits - 1)).half().clamp_(min=2.0**-14)
        codes = ((grouped - low.float()) / scale.float()).round_().clamp_(0, 2**self.bits - 1).to(torch.uint8)
        return {"code": pack(codes.flatten(-2)[..., :width], self.bits), "scale": scale[..., 0], "low": low[..., 0]}

    def decode(self, parts: Mapping[str, Tensor], width: int, dtype: torch.dtype) -> Tensor:
        grouped = self._split(unpack(parts["code"], self.bits, width).float())
        return (grouped * parts["scale"][..., None].float() + parts["low"][..., None].float()).flatten(-2)[..., :width].to(dtype)

    def _split(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., groups, group]; a short last group repeats its last entry, which changes no range."""
        width = x.shape[-1]
        size = width if self.group is None else self.group
        short = -width % size
        if short:
            x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], -1)
        return x.unflatten(-1, (-1, size))


def _largest(x: Tensor) -> Tensor:
    """max |x| along the last dim, kept; never so small that it could not be divided by."""
    return x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)


def stored_bytes(layout: Layout) -> int:
    """Bytes of one entry."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
