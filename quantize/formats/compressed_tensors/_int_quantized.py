"""``int-quantized``: weights and inputs of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.int8 import Int8
from zoo.components.spec import TensorInfo, load
from zoo.formats import check_floats, check_values, member
from zoo.quantize.formats.compressed_tensors._scheme import Allowed, Group, Scheme, arguments, raise_for, wrong

NAMES = {"weight": "weight", "scale": "weight_scale", "input_scale": "input_scale", "bias": "bias"}
COMMON: Allowed = {"type": ("int", None), "num_bits": (8,), "symmetric": (True, None)}
WEIGHTS: Allowed = {**COMMON, "strategy": ("channel", "tensor"), "dynamic": (False, None)}
DYNAMIC = {"token": True, "tensor": False}  # strategy of the inputs -> dynamic
SCALES = ("float32", "bfloat16", "float16")


class IntQuantized(Scheme):
    """Symmetric integers with a scale per output; inputs with a scale per token, found as they come, or with one that is stored.

    A weight with one scale for all outputs is read as one that has it for each.
    """

    formats = ("int-quantized",)

    def storage(self, group: Group, place: str, tensors: Mapping[str, TensorInfo]) -> Int8:
        weights, inputs = arguments(group, "weights", place), dict(member(group, "input_activations", Mapping, {}, place))
        raise_for(place, _reasons(group, weights, inputs))
        scale = tensors.get(NAMES["scale"], TensorInfo((), "float32")).dtype
        return load(Int8, {"inputs": inputs["strategy"], "scale_dtype": scale if scale in SCALES else "float32"}, place)

    def holds(self, storage: Linear) -> bool:
        return isinstance(storage, Int8)

    def refuses(self, storage: Linear) -> list[str]:
        return []

    def group(self, storage: Linear) -> dict[str, Any]:
        assert isinstance(storage, Int8)
        common = {"num_bits": 8, "type": "int", "symmetric": True}
        inputs = {"strategy": storage.inputs, "dynamic": DYNAMIC[storage.inputs]}
        weights = {"strategy": "channel", "dynamic": False}
        return {"format": self.formats[0], "weights": common | weights, "input_activations": common | inputs}

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        return [NAMES[name] for name in storage.own_tensors(1, 1, bias)]

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        ours = {name: tensors[theirs] for name, theirs in NAMES.items() if theirs in tensors}
        if ours["weight"].shape != (outputs, inputs) or ours["weight"].dtype != torch.int8:
            given = f"{str(ours['weight'].dtype).removeprefix('torch.')} {list(ours['weight'].shape)}"
            raise ValueError(f"weight is {given}, it must be int8 {[outputs, inputs]}")
        check_floats((NAMES["scale"], NAMES["input_scale"]), tensors)
        for name, size in (("scale", outputs), ("input_scale", 1)):
            if name in ours and ours[name].numel() not in (1, size):
                raise ValueError(f"{NAMES[name]} is {list(ours[name].shape)}, it must hold 1 or {size} numbers")
        ours["scale"] = ours["scale"].reshape(-1, 1).expand(outputs, 1).contiguous()
        if "input_scale" in ours:
            ours["input_scale"] = ours["input_scale"].reshape(1).float()
        check_values(storage, ours, NAMES)
        return ours

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        return {NAMES[name]: tensor for name, tensor in tensors.items()}


def _reasons(group: Group, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Iterator[str]:
    yield from wrong(weights, WEIGHTS, "weights")
    if not inputs:
        yield "input_activations is missing: weights of 8 bits without rounded inputs are written as pack-quantized"
        return
    yield from wrong(inputs, {**COMMON, "strategy": tuple(DYNAMIC)}, "input_activations")
    if inputs.get("strategy") in tuple(DYNAMIC):  # which need not be hashable
        yield from wrong(inputs, {"dynamic": (DYNAMIC[inputs["strategy"]], *((None,) if inputs["strategy"] == "tensor" else ()))},
                         "input_activations")  # fmt: skip
    if group.get("output_activations") is not None:
        yield "output_activations: rounded outputs are not supported"
