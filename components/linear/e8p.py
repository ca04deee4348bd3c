"""A weight matrix as points of the E8 lattice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear._held import HeldLinear
from zoo.components.numerics import e8
from zoo.components.registry import part
from zoo.components.spec import TensorInfo


@part(Linear, "e8p", source="Tseng et al. 2024, arXiv:2402.04396 (QuIP#), section 4.2")
@dataclass(frozen=True, kw_only=True)
class E8P(Linear):
    """A code of 8 times ``bits`` bits for every 8 neighbouring inputs of an output, and one scale for all."""

    bits: e8.Bits = 2

    def problems(self, inputs: int, outputs: int, bias: bool) -> Iterator[tuple[str, str]]:
        if inputs % e8.WIDTH:
            yield "bits", f"{inputs} inputs do not divide into vectors of {e8.WIDTH}"

    def own_tensors(self, inputs: int, outputs: int, bias: bool) -> dict[str, TensorInfo]:
        held = {"codes": TensorInfo((outputs, inputs // e8.WIDTH * self.bits), "uint8"), "scale": TensorInfo((1,), "float32")}
        return held | ({"bias": TensorInfo((outputs,))} if bias else {})

    def build(self, inputs: int, outputs: int, bias: bool) -> E8PLinear:
        return E8PLinear(self, inputs, outputs, bias)

    def encode(self, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """The tensors of codes [outputs, inputs / 8] int64 and a scale [1]: a code's bytes follow each other, the lowest first."""
        octets = codes.contiguous().view(torch.uint8).unflatten(-1, (-1, 8))[..., : self.bits]
        return {"codes": octets.flatten(-2).contiguous(), "scale": scale}


class E8PLinear(HeldLinear):
    """[..., inputs] -> [..., outputs]. Points are looked up in a table of all 65,536; the scale is applied to the product."""

    spec: E8P
    codes: Tensor
    scale: Tensor

    def words(self) -> Tensor:
        """[outputs, inputs / 8] int32, or int64 at 4 bits, whose codes fill 32 bits."""
        first, *rest = self._stages()
        return first if not rest else first | rest[0].long() << 16 if self.spec.bits == 4 else first | rest[0] << 16

    def forward(self, x: Tensor) -> Tensor:
        return self.biased((F.linear(x / 4, self._points().to(x.dtype)) * self.scale).to(x.dtype))

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[outputs, inputs], by default in float32; rounded once."""
        wide = torch.promote_types(dtype or torch.float32, torch.float32)
        return e8.decode(self.words(), self.spec.bits, wide).flatten(-2).mul_(self.scale).to(dtype or torch.float32)

    def _stages(self) -> list[Tensor]:
        """The code of each stage, [outputs, inputs / 8] int32."""
        octets = self.codes.unflatten(-1, (-1, self.spec.bits))
        parts = [octets[..., :2], octets[..., 2:]][: 1 if self.spec.bits == 2 else 2]
        return [p[..., 0].int() if p.shape[-1] == 1 else p.contiguous().view(torch.int16).squeeze(-1).int() & 0xFFFF for p in parts]

    def _points(self) -> Tensor:
        """Four times the points, [outputs, inputs]: int8 at 2 bits, float32 where two stages add up."""
        device, (first, *rest) = self.codes.device, self._stages()
        points = e8.quadrupled(first, e8.octets(16, device))
        if not rest:
            return points
        second = e8.quadrupled(rest[0], e8.octets(8 if self.spec.bits == 3 else 16, device))
        return points.float().add_(second, alpha=1 / e8.STAGES[self.spec.bits].residual)
