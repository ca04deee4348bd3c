"""``pack-quantized``: the layout of our own packed integers, under other names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.packed_int import PackedInt
from zoo.components.spec import TensorInfo, load
from zoo.quantize.formats.compressed_tensors._scheme import Allowed, Group, Scheme, arguments, raise_for, wrong

NAMES = {"packed": "weight_packed", "scale": "weight_scale", "zero": "weight_zero_point", "bias": "bias"}
SHAPE = "weight_shape"
INDEX = "weight_g_idx"
WEIGHTS: Allowed = {
    "type": ("int", None),
    "num_bits": (2, 3, 4, 5, 6, 7, 8),
    "strategy": ("group", "channel"),
    "dynamic": (False, None),
    "symmetric": (True, False, None),
    "actorder": (None, False, "weight", "static"),
}


class PackQuantized(Scheme):
    """Integers of 2 to 8 bits packed along the input, scales per channel or group.

    Codes are stored with an offset of 2^(bits-1), zero points likewise and packed along the output. Act-order is never stored as an
    index: group scales follow the original order of the inputs.
    """

    formats = ("pack-quantized",)

    def storage(self, group: Group, place: str, tensors: Mapping[str, TensorInfo]) -> PackedInt:
        weights = arguments(group, "weights", place)
        raise_for(place, _reasons(group, weights, tensors))
        size = weights.get("group_size")
        settings = {"bits": weights["num_bits"], "group_size": size if weights["strategy"] == "group" else None,
                    "symmetric": weights.get("symmetric") is not False}  # fmt: skip
        plain = load(PackedInt, settings, place)
        scale = tensors.get(NAMES["scale"], TensorInfo(())).dtype
        usual = scale in (None, str(plain.grid.scale_dtype).removeprefix("torch."))
        return plain if usual else load(PackedInt, settings | {"scale_dtype": scale}, place)

    def holds(self, storage: Linear) -> bool:
        return isinstance(storage, PackedInt)

    def refuses(self, storage: Linear) -> list[str]:
        scattered = isinstance(storage, PackedInt) and storage.scattered
        return ["pack-quantized holds groups of neighbouring inputs; write gptq_v2"] if scattered else []

    def group(self, storage: Linear) -> dict[str, Any]:
        assert isinstance(storage, PackedInt)
        weights = {
            "num_bits": storage.bits,
            "type": "int",
            "symmetric": storage.symmetric,
            "strategy": "group" if storage.group_size else "channel",
            "group_size": storage.group_size,
            "dynamic": False,
        }
        return {"format": self.formats[0], "weights": weights, "input_activations": None}

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        return [*(NAMES[name] for name in storage.own_tensors(1, 1, bias)), SHAPE]

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        if tensors[SHAPE].tolist() != [outputs, inputs]:
            raise ValueError(f"{SHAPE} says {tensors[SHAPE].tolist()}, the model has {[outputs, inputs]}")
        ours = {name: tensors[theirs] for name, theirs in NAMES.items() if theirs in tensors}
        for name, info in storage.own_tensors(inputs, outputs, "bias" in ours).items():
            if ours[name].shape != info.shape:
                raise ValueError(f"{NAMES[name]} is {list(ours[name].shape)}, a weight of {[outputs, inputs]} has {list(info.shape)}")
            if info.dtype and ours[name].dtype != getattr(torch, info.dtype):
                raise ValueError(f"{NAMES[name]} is {str(ours[name].dtype).removeprefix('torch.')}, it must be {info.dtype}")
        return ours

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        return {NAMES[n]: t for n, t in tensors.items()} | {SHAPE: torch.tensor([outputs, inputs])}


def _reasons(group: Group, weights: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    yield from wrong(weights, WEIGHTS, "weights")
    for field in ("input_activations", "output_activations"):
        if group.get(field) is not None:
            yield f"{field}: quantized activations are not supported with packed weights"
    if INDEX in tensors:
        yield f"{INDEX}: act-order by index is not supported"
