"""What the schemes of few-bit floats share: rounded inputs, and tensors that are ours under other names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.packed_float import FloatInputs, PackedFloat
from zoo.components.numerics.floats import ElementName
from zoo.components.spec import TensorInfo, dump
from zoo.quantize.formats._float_tensors import Names, Typed, read, write
from zoo.quantize.formats.compressed_tensors._scheme import Allowed, Group, Scheme, arguments, raise_for, wrong

BITS: dict[ElementName, int] = {"e2m1": 4, "e2m3": 6, "e4m3": 8}  # the one element that the library has for a number of bits
BYTE, E4M3 = "torch.uint8", "torch.float8_e4m3fn"  # scale_dtype of powers of two, and of NVFP4
NAMES = {"packed": "weight_packed", "scale": "weight_scale", "divisor": "weight_global_scale",
         "input_multiplier": "input_scale", "input_divisor": "input_global_scale", "bias": "bias"}  # fmt: skip
WEIGHTS: Allowed = {"type": ("float",), "symmetric": (True, None), "dynamic": (False, None)}
INPUTS: Allowed = {"type": ("float",), "num_bits": (4, 6, 8), "symmetric": (True, None)}
SCALES = {
    "token": (True, FloatInputs()),
    "group": (True, FloatInputs()),
    "tensor": (False, FloatInputs(scale=None, tensor_scale="multiplier")),
    "tensor_group": ("local", FloatInputs(scale="e4m3", tensor_scale="divisor")),
}  # strategy of input_activations -> dynamic, and what they are rounded to but for element and group


class FloatScheme(Scheme):
    """A scheme whose tensors are those of ``packed_float``. typed: those that have an 8-bit float dtype on disk, bytes otherwise."""

    weights: ClassVar[Allowed]
    typed: ClassVar[Typed] = {}
    names: ClassVar[Names] = NAMES

    @abstractmethod
    def weight(self, arguments: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> PackedFloat:
        """The storage without rounded inputs, for ``weights`` that have been checked."""

    @abstractmethod
    def weight_arguments(self, storage: PackedFloat) -> dict[str, Any]:
        """The inverse, but for what all schemes say."""

    def storage(self, group: Group, place: str, tensors: Mapping[str, TensorInfo]) -> PackedFloat:
        weights = arguments(group, "weights", place)
        inputs = arguments(group, "input_activations", place) if group.get("input_activations") is not None else None
        raise_for(place, self._reasons(group, weights, inputs))
        return replace(self.weight(weights, tensors), inputs=read_inputs(inputs) if inputs else None)

    def holds(self, storage: Linear) -> bool:
        if not isinstance(storage, PackedFloat):
            return False
        weights, scale = self._written(storage), {self.names["scale"]: TensorInfo((), storage.scale)}
        return not any(wrong(weights, self.weights, "weights")) and self.weight(weights, scale) == plain(storage)

    def refuses(self, storage: Linear) -> list[str]:
        assert isinstance(storage, PackedFloat)
        inputs = write_inputs(storage.inputs)
        known = inputs is None or (not any(_wrong_inputs(inputs)) and read_inputs(inputs) == storage.inputs)
        return [] if known else [f"{self.formats[0]} cannot say that inputs are rounded to {dump(storage.inputs)}"]

    def group(self, storage: Linear) -> dict[str, Any]:
        assert isinstance(storage, PackedFloat)
        weights = {field: value for field, value in self._written(storage).items() if value is not None}
        return {"format": self.formats[0], "weights": weights, "input_activations": write_inputs(storage.inputs)}

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        return [self.names[name] for name in storage.own_tensors(8, 1, bias)]

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        assert isinstance(storage, PackedFloat)
        return read(storage, self.names, self.typed, tensors, inputs, outputs)

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        return write(self.names, self.typed, tensors)

    def _written(self, storage: PackedFloat) -> dict[str, Any]:
        common = {"num_bits": BITS.get(storage.element), "type": "float", "symmetric": True, "dynamic": False}
        return common | self.weight_arguments(storage)

    def _reasons(self, group: Group, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Iterator[str]:
        yield from wrong(weights, {**WEIGHTS, **self.weights}, "weights")
        if inputs is not None:
            yield from _wrong_inputs(inputs)
        if group.get("output_activations") is not None:
            yield "output_activations: rounded outputs are not supported"


def plain(storage: PackedFloat) -> PackedFloat:
    """The storage without what concerns its inputs and its product."""
    return replace(storage, inputs=None, matmul=None)


def element_of(bits: int) -> ElementName:
    return next(name for name, count in BITS.items() if count == bits)


def read_inputs(arguments: Mapping[str, Any]) -> FloatInputs:
    """``input_activations`` that have been checked."""
    _, base = SCALES[arguments["strategy"]]
    size = arguments.get("group_size") if arguments["strategy"] in ("group", "tensor_group") else None
    powers = arguments.get("scale_dtype") == BYTE
    return replace(base, element=element_of(arguments["num_bits"]), group_size=size, scale="e8m0" if powers else base.scale)


def write_inputs(inputs: FloatInputs | None) -> dict[str, Any] | None:
    """The inverse. What it cannot say is left to a comparison with what is read back."""
    if inputs is None:
        return None
    grouped = "group" if inputs.group_size else "token"
    strategy = "tensor" if inputs.scale is None else "tensor_group" if inputs.scale == "e4m3" else grouped
    found = {"num_bits": BITS.get(inputs.element), "type": "float", "symmetric": True, "strategy": strategy, "dynamic": SCALES[strategy][0]}
    scale = {"e8m0": BYTE, "e4m3": E4M3}.get(inputs.scale or "")
    return found | ({"group_size": inputs.group_size} if inputs.group_size else {}) | ({"scale_dtype": scale} if scale else {})


def _wrong_inputs(inputs: Mapping[str, Any]) -> Iterator[str]:
    yield from wrong(inputs, {**INPUTS, "strategy": tuple(SCALES)}, "input_activations")
    if inputs["strategy"] not in tuple(SCALES):  # which need not be hashable
        return
    dynamic, base = SCALES[inputs["strategy"]]
    kinds = (None, E4M3) if base.scale == "e4m3" else (None, BYTE)
    sizes = (16,) if base.scale == "e4m3" else (inputs.get("group_size"),)
    yield from wrong(inputs, {"dynamic": (dynamic,), "scale_dtype": kinds, "group_size": sizes}, "input_activations")
    if inputs.get("scale_dtype") == BYTE and inputs.get("group_size") != 32:
        yield f"input_activations.group_size: powers of two as scales are for groups of 32, not {inputs.get('group_size')!r:.60}"
