"""A weight matrix as packed integers of few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zoo.components.contracts import Linear, StoredLinear
from zoo.components.numerics import integer
from zoo.components.numerics.integer import Grid
from zoo.components.ops.packed_matmul import Form, Layout, PackedMatmul, choose
from zoo.components.ops.packed_matmul.reference import Reference
from zoo.components.registry import part
from zoo.components.spec import TensorInfo

CANONICAL = Reference()


@part(Linear, "packed_int", source="compressed-tensors pack-quantized")
@dataclass(frozen=True, kw_only=True)
class PackedInt(Linear):
    """Integers of few bits with a scale per group, (code - zero) * scale.

    group_size: inputs that share a scale, None: one scale per output. symmetric: the zero is the middle code, else one is stored per
    group. scale_dtype: None is bfloat16 for groups and float32 per output. scattered: the inputs of a group need not be
    neighbours; each names its group (GPTQ's act-order by index). matmul: the product, None is the fastest that accepts.
    """

    bits: Literal[2, 3, 4, 5, 6, 7, 8] = 4
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    scattered: bool = False
    matmul: PackedMatmul | None = None

    @property
    def grid(self) -> Grid:
        default = "bfloat16" if self.group_size else "float32"
        return Grid(self.bits, self.group_size, self.symmetric, getattr(torch, self.scale_dtype or default))

    def problems(self, inputs: int, outputs: int, bias: bool) -> Iterator[tuple[str, str]]:
        if self.group_size is not None and (self.group_size < 1 or inputs % self.group_size):
            yield "group_size", f"{inputs} inputs do not divide into groups of {self.group_size}"
        if self.scattered and self.group_size is None:
            yield "scattered", "there is one group, so no input can be in another; give a group_size"

    def own_tensors(self, inputs: int, outputs: int, bias: bool) -> dict[str, TensorInfo]:
        groups = self.grid.groups(inputs)
        held = {
            "packed": TensorInfo((outputs, integer.packed_size(inputs, self.bits)), "int32"),
            "scale": TensorInfo((outputs, groups), str(self.grid.scale_dtype).removeprefix("torch.")),
        }
        if not self.symmetric:
            held["zero"] = TensorInfo((integer.packed_size(outputs, self.bits), groups), "int32")
        if self.scattered:
            held["group_index"] = TensorInfo((inputs,), "int32")
        return held | ({"bias": TensorInfo((outputs,))} if bias else {})

    def faults(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        groups = tensors["scale"].shape[1]
        if self.scattered and bool(((tensors["group_index"] < 0) | (tensors["group_index"] >= groups)).any()):
            least, most = (int(n) for n in tensors["group_index"].aminmax())
            yield "group_index", f"must lie in 0..{groups - 1}, the weight's groups, but reaches from {least} to {most}"

    def build(self, inputs: int, outputs: int, bias: bool) -> PackedLinear:
        return PackedLinear(self, inputs, outputs, bias)

    def encode(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Layout:
        """The tensors of a quantized weight: codes [outputs, inputs] uint8, scale and zero (uint8) [outputs, groups]."""
        held = {"packed": integer.pack(codes, self.bits), "scale": scale}
        return held if self.symmetric else held | {"zero": integer.pack_rows(zero, self.bits)}


class PackedLinear(StoredLinear):
    """[..., inputs] -> [..., outputs].

    One layout is held at a time: the canonical one after building and loading, that of the chosen product after ``prepare``. The
    state dict is always canonical. Moves go through the canonical layout, and a cast leaves codes and scales as they are.
    """

    bias: nn.Parameter | None

    def __init__(self, spec: PackedInt, inputs: int, outputs: int, bias: bool):
        super().__init__()
        self.spec, self.inputs, self.outputs = spec, inputs, outputs
        self.form = Form(spec.grid, inputs, outputs, spec.scattered)
        self.matmul: PackedMatmul = CANONICAL
        tensors = spec.own_tensors(inputs, outputs, bias)
        self._keep({n: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for n, t in tensors.items() if t.dtype})
        self.register_parameter("bias", nn.Parameter(torch.zeros(outputs), requires_grad=False) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.matmul.product(self.form, self.layout, x)
        return y if self.bias is None else y + self.bias

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[outputs, inputs], by default in the scale's dtype."""
        return self.matmul.dense(self.form, self.layout, dtype or self.form.grid.scale_dtype)

    @property
    def layout(self) -> Layout:
        """The tensors that are held, the bias aside."""
        return dict(self._buffers)  # pyright: ignore[reportReturnType] (no buffer is None)

    def canonical(self) -> Layout:
        """The tensors as they are stored, named as by the spec's ``own_tensors``."""
        held = self.matmul.to_canonical(self.form, self.layout)
        return held if self.bias is None else held | {"bias": self.bias}

    def prepare(self) -> None:
        """Change to the layout of the product that suits the device. Raises ValueError if a product that was named refuses."""
        device = next(self.buffers()).device
        if device.type != "meta":
            self._change(choose(self.spec.matmul, self.form, device))

    def hold(self, canonical: Layout) -> None:
        self._keep(canonical)
        self.matmul = CANONICAL
        self.prepare()

    def _change(self, matmul: PackedMatmul) -> None:
        if matmul != self.matmul:
            canonical = self.matmul.to_canonical(self.form, self.layout)
            self._keep(matmul.from_canonical(self.form, canonical))
            self.matmul = matmul

    def _keep(self, layout: Layout) -> None:
        self._buffers.clear()
        for name, tensor in layout.items():
            self.register_buffer(name, tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        self._change(CANONICAL)
        held = {id(t) for t in self.layout.values()}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in held and moved.dtype != tensor.dtype else moved

        super()._apply(move, recurse)
        self.prepare()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.canonical().items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(self, *args: Any) -> None:
        self._change(CANONICAL)
        super()._load_from_state_dict(*args)
        self.prepare()

    def extra_repr(self) -> str:
        grid = self.spec.grid
        groups = f"groups of {grid.group_size}" if grid.group_size else "per output"
        return f"{self.inputs}, {self.outputs}, {grid.bits} bits, {groups}, {self.matmul.name}"
