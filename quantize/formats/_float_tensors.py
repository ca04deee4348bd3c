"""The tensors of ``packed_float`` under the names that formats give them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from zoo.components.linear.packed_float import PackedFloat
from zoo.formats import check_values

Names = Mapping[str, str]  # our tensor -> its name on disk
Typed = Mapping[str, torch.dtype]  # tensors that are bytes with us and floats of 8 bits on disk


def read(storage: PackedFloat, names: Names, typed: Typed, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
    """Our tensors from those on disk. Vectors and scalars may stand for matrices.

    Raises ValueError for other shapes and dtypes, and for values that no weight can have.
    """
    found = {}
    for name, info in storage.own_tensors(inputs, outputs, names["bias"] in tensors).items():
        tensor, theirs = tensors[names[name]], names[name]
        kind = typed.get(name) or (getattr(torch, info.dtype) if info.dtype else tensor.dtype)
        if tensor.shape != info.shape and not (tensor.dim() < 2 and tensor.numel() == math.prod(info.shape)):
            raise ValueError(f"{theirs} is {list(tensor.shape)}, a weight of {[outputs, inputs]} has {list(info.shape)}")
        if tensor.dtype != kind and not (kind == torch.float32 and tensor.dtype.is_floating_point and tensor.itemsize > 1):
            raise ValueError(f"{theirs} is {_word(tensor.dtype)}, it must be {_word(kind)}")
        found[name] = (tensor.view(torch.uint8) if name in typed else tensor.to(kind)).view(info.shape)
    check_values(storage, found, names)
    return found


def write(names: Names, typed: Typed, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse, in our shapes."""
    return {names[name]: t.view(typed[name]) if name in typed else t for name, t in tensors.items()}


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
