"""A weight matrix as floats of few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear._held import NOT_POSITIVE, HeldLinear, positive
from zoo.components.numerics import floats, scaled
from zoo.components.numerics.e8m0 import Rule
from zoo.components.numerics.floats import ELEMENTS, ElementName
from zoo.components.numerics.scaled import Grid, ScaleName, TensorScale
from zoo.components.ops.float_matmul import FloatMatmul, Form, choose
from zoo.components.ops.float_matmul.reference import dense
from zoo.components.ops.straight_through import straight_through
from zoo.components.registry import part
from zoo.components.spec import Spec, TensorInfo

BYTES = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}  # scales that are codes of 8 bits
SIGN, NAN = 0x80, 0xFF  # of the codes of E4M3: negative numbers lie between them
POSITIVE = ("divisor", "input_divisor", "input_multiplier")


@dataclass(frozen=True, kw_only=True)
class FloatInputs(Spec):
    """How the inputs of a product are rounded, token by token.

    group_size: channels that share a scale, None for all of a token. scale: how it is stored, None where all tokens share the fixed
    tensor scale alone. tensor_scale: a fixed scale for all tokens, which scales are divided by or multiplied with. scale_rule: how a
    scale of E8M0 is taken from the largest magnitude.
    """

    element: ElementName = "e4m3"
    group_size: int | None = None
    scale: Literal["float32", "e8m0", "e4m3"] | None = "float32"
    tensor_scale: TensorScale | None = None
    scale_rule: Rule = "round"

    @property
    def grid(self) -> Grid:
        rows = 1 if self.scale else None
        return Grid(ELEMENTS[self.element], rows, self.group_size, self.scale, self.tensor_scale, self.scale_rule)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.group_size is not None and self.group_size < 1:
            yield "inputs.group_size", f"must be at least 1, got {self.group_size}"
        if self.scale is None and (self.tensor_scale is None or self.group_size is not None):
            yield "inputs.scale", "without scales of their own all inputs share a tensor_scale and no group_size"


@part(Linear, "packed_float", source="OCP Microscaling Formats 1.0; compressed-tensors float-quantized and nvfp4-pack-quantized")
@dataclass(frozen=True, kw_only=True)
class PackedFloat(Linear):
    """Floats of 4, 6 or 8 bits with scales for outputs, groups of inputs, or blocks of both; with or without rounded inputs.

    group_outputs, group_size: outputs and inputs that share a scale, None for all. scale: how it is stored. tensor_scale: one more
    for the whole weight, by which scales are divided, or with which they are multiplied (NVFP4). inputs: how the inputs are rounded.
    matmul: the product, None is the fastest that accepts.
    """

    element: ElementName = "e4m3"
    group_outputs: int | None = 1
    group_size: int | None = None
    scale: ScaleName = "float32"
    tensor_scale: TensorScale | None = None
    inputs: FloatInputs | None = None
    matmul: FloatMatmul | None = None

    @property
    def grid(self) -> Grid:
        return Grid(ELEMENTS[self.element], self.group_outputs, self.group_size, self.scale, self.tensor_scale)

    def problems(self, inputs: int, outputs: int, bias: bool) -> Iterator[tuple[str, str]]:
        group, bits = self.group_size, self.grid.element.bits
        if self.group_outputs is not None and self.group_outputs < 1:
            yield "group_outputs", f"must be at least 1, got {self.group_outputs}"
        if group is not None and (group < 1 or (self.group_outputs == 1 and inputs % group)):
            yield "group_size", f"{inputs} inputs do not divide into groups of {group}"
        if inputs * bits % 8:
            yield "element", f"{inputs} inputs of {bits} bits do not fill whole bytes"
        if self.inputs is not None:
            yield from self.inputs.problems()
            size = self.inputs.group_size
            if size and size != group and inputs % size:  # of the weight's own size they are cut at the edge where its blocks are
                yield "inputs.group_size", f"{inputs} inputs do not divide into groups of {size}"

    def own_tensors(self, inputs: int, outputs: int, bias: bool) -> dict[str, TensorInfo]:
        held = {
            "packed": TensorInfo((outputs, floats.packed_size(inputs, self.grid.element)), "uint8"),
            "scale": TensorInfo(self.grid.shape(outputs, inputs), "uint8" if self.scale in BYTES else self.scale),
        }
        names = [self.tensor_scale, f"input_{self.inputs.tensor_scale}" if self.inputs and self.inputs.tensor_scale else None]
        held |= {name: TensorInfo((1,), "float32") for name in names if name}
        return held | ({"bias": TensorInfo((outputs,))} if bias else {})

    def faults(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        yield from ((name, NOT_POSITIVE) for name in POSITIVE if name in tensors and not positive(tensors[name]))
        if self.scale == "e4m3" and bool(((tensors["scale"] > SIGN) & (tensors["scale"] < NAN)).any()):
            yield "scale", "holds negative numbers, which kernels read as positive ones"

    def build(self, inputs: int, outputs: int, bias: bool) -> FloatLinear:
        return FloatLinear(self, inputs, outputs, bias)

    def encode(self, weight: Tensor, scale: Tensor, tensor_scale: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors of a weight [outputs, inputs] that is rounded with these stored scales, those of the inputs aside."""
        codes = scaled.codes(weight, scaled.effective(scale, tensor_scale, self.grid), self.grid)
        held = {"packed": floats.pack(codes, self.grid.element), "scale": scale}
        return held if tensor_scale is None else held | {str(self.tensor_scale): tensor_scale}


class FloatLinear(HeldLinear):
    """[..., inputs] -> [..., outputs]; gradients pass the rounding of inputs as if it were not there.

    Codes are held as bytes, since few operators know floats of 8 bits.
    """

    spec: PackedFloat

    def __init__(self, spec: PackedFloat, inputs: int, outputs: int, bias: bool):
        super().__init__(spec, inputs, outputs, bias)
        self.form = Form(spec.grid, spec.inputs.grid if spec.inputs else None, inputs, outputs)
        self.prepare()

    def forward(self, x: Tensor) -> Tensor:
        product = partial(self.matmul.product, self.form, self.held)
        return self.biased(product(x) if self.spec.inputs is None else straight_through(x, product, self.dense_weight))

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[outputs, inputs], by default in float32."""
        return dense(self.form, self.held, dtype or torch.float32)

    @property
    def held(self) -> dict[str, Tensor]:
        """The tensors, the bias aside."""
        return dict(self._buffers)  # pyright: ignore[reportReturnType] (no buffer is None)

    def numbers(self, name: str, tensor: Tensor) -> Tensor:
        kinds = {"packed": self.spec.grid.element.dtype, "scale": BYTES.get(self.spec.scale)}
        return tensor.view(kinds.get(name) or tensor.dtype)

    def prepare(self) -> None:
        """Choose the product that suits the device. Raises ValueError if one that was named refuses."""
        packed = self.get_buffer("packed")
        named = None if packed.is_meta else self.spec.matmul  # nothing is multiplied where no tensor is
        self.matmul = choose(named, self.form, packed.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FloatLinear:
        super()._apply(fn, recurse)
        self.prepare()
        return self

    def extra_repr(self) -> str:
        spec, matmul = self.spec, self.matmul.name
        return f"{self.inputs}, {self.outputs}, {spec.element}, {spec.scale} scales for {spec.group_outputs} x {spec.group_size}, {matmul}"
