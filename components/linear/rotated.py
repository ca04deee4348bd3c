"""A weight matrix that is stored after a rotation of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.components.contracts import Linear, attach
from zoo.components.linear._held import HeldLinear
from zoo.components.numerics.hadamard import supported, transform
from zoo.components.registry import part
from zoo.components.spec import Child, TensorInfo

INNER = "inner."


@part(Linear, "rotated", source="Tseng et al. 2024, arXiv:2402.04396 (QuIP#), section 3", example={"inner": "e8p"})
@dataclass(frozen=True, kw_only=True)
class Rotated(Linear):
    """W = diag(s_out) H^T W_inner H diag(s_in), with Hadamard matrices H and a sign (or a tuned factor) for each input and output.

    After the rotation the weights are nearly normal and no input stands out, which few bits hold best. inner: how they are stored.
    """

    inner: Linear

    def problems(self, inputs: int, outputs: int, bias: bool) -> Iterator[tuple[str, str]]:
        for what, width in (("inputs", inputs), ("outputs", outputs)):
            if not supported(width):
                yield "inner", f"{width} {what} have no Hadamard matrix that rotates them"
        if self.inner.name in ("dense", self.name):
            yield "inner", f"{self.inner.name} gains nothing from a rotation; e8p and mid_rise do"

    def children(self, inputs: int, outputs: int, bias: bool) -> dict[str, Child]:
        return {"inner": Child(self.inner, (inputs, outputs, False))}

    def own_tensors(self, inputs: int, outputs: int, bias: bool) -> dict[str, TensorInfo]:
        held = {"input_signs": TensorInfo((inputs,), "float16"), "output_signs": TensorInfo((outputs,), "float16")}
        return held | ({"bias": TensorInfo((outputs,))} if bias else {})

    def faults(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        inner = {name.removeprefix(INNER): tensor for name, tensor in tensors.items() if name.startswith(INNER)}
        yield from ((INNER + name, reason) for name, reason in self.inner.faults(inner))

    def build(self, inputs: int, outputs: int, bias: bool) -> RotatedLinear:
        return RotatedLinear(self, inputs, outputs, bias)

    def encode(self, inner: dict[str, Tensor], input_signs: Tensor, output_signs: Tensor) -> dict[str, Tensor]:
        """The tensors of the inner storage's and the signs, [inputs] and [outputs]."""
        signs = {"input_signs": input_signs.half(), "output_signs": output_signs.half()}
        return signs | {INNER + name: tensor for name, tensor in inner.items()}


class RotatedLinear(HeldLinear):
    """[..., inputs] -> [..., outputs]. Rotates in float32 at least, multiplies in the dtype of the input."""

    inner: Any  # a StoredLinear, which has dense_weight too
    input_signs: Tensor
    output_signs: Tensor

    def __init__(self, spec: Rotated, inputs: int, outputs: int, bias: bool):
        super().__init__(spec, inputs, outputs, bias)
        attach(self, spec.children(inputs, outputs, bias))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        turned = transform(x.to(wide) * self.input_signs).to(x.dtype)
        y = transform(self.inner(turned).to(wide), inverse=True) * self.output_signs
        return self.biased(y.to(x.dtype))

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[outputs, inputs], by default in float32; computed in float32 at least."""
        wide = torch.promote_types(dtype or torch.float32, torch.float32)
        rows = transform(self.inner.dense_weight(wide), inverse=True) * self.input_signs
        return (transform(rows.t(), inverse=True) * self.output_signs).t().to(dtype or torch.float32)

    def canonical(self) -> dict[str, Tensor]:
        return super().canonical() | {INNER + name: tensor for name, tensor in self.inner.canonical().items()}

    def hold(self, canonical: dict[str, Tensor]) -> None:
        self.inner.hold({name.removeprefix(INNER): tensor for name, tensor in canonical.items() if name.startswith(INNER)})
        super().hold({name: tensor for name, tensor in canonical.items() if not name.startswith(INNER)})

    def prepare(self) -> None:
        self.inner.prepare()
