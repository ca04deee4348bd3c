"""AWQ checkpoints as AutoAWQ writes them (version gemm): 4 bits, eight outputs in a word, in an order of their own.

Shapes: N outputs, K inputs, G groups. ``qweight`` int32 [K, N / 8], ``qzeros`` int32 [G, N / 8], ``scales`` [G, N]. The nibbles of a
word, lowest first, hold its outputs 0, 2, 4, 6, 1, 3, 5, 7; zero points are stored as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.packed_int import PackedInt
from zoo.components.numerics import integer
from zoo.components.registry import part
from zoo.components.spec import TensorInfo, load
from zoo.formats import Format, check_shapes, words

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's outputs among its nibbles
BACK = (0, 4, 1, 5, 2, 6, 3, 7)  # its inverse
PLACE = "quantization_config"


@part(Format, "awq", source="AutoAWQ, version gemm; Lin et al. 2023, arXiv:2306.00978")
@dataclass(frozen=True, kw_only=True)
class AWQFormat(Format):
    """4-bit integers with a zero point per group, packed along the output; read by vLLM, SGLang and transformers.

    A symmetric storage is written with the middle as every zero point, and read again as an asymmetric one of the same numbers.
    """

    method = "awq"

    def storage(self, config: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> PackedInt | None:
        size, bits, version = _either(config, "group_size", "q_group_size"), _either(config, "bits", "w_bit"), config.get("version", "gemm")
        refused = {
            f"bits: {bits!r:.60} is not supported; supported: 4": type(bits) is not int or bits != 4,
            f"group_size must be a positive number or -1, it is {size!r:.60}": type(size) is not int or not (size == -1 or size > 0),
            f"version: {version!r:.60} is not supported; supported: gemm": str(version).lower() != "gemm",
            "zero_point: only true is supported": config.get("zero_point", True) is not True,
        }
        problems = [f"{PLACE}.{why}" for why, holds in refused.items() if holds]
        if problems:
            raise ValueError("; ".join(problems))
        plain = words(config, "modules_to_not_convert", PLACE)
        if any(word in module for word in plain) or module.endswith("lm_head") or (tensors and "qweight" not in tensors):
            return None
        scale = tensors.get("scales", TensorInfo((), "float16")).dtype
        wanted = {"bits": 4, "group_size": None if size == -1 else size, "symmetric": False, "scale_dtype": scale}
        return load(PackedInt, wanted, PLACE)

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        return ["qweight", "qzeros", "scales", *(["bias"] if bias else [])]

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        assert isinstance(storage, PackedInt)
        groups = storage.grid.groups(inputs)
        check_shapes({"qweight": (inputs, outputs // 8), "qzeros": (groups, outputs // 8), "scales": (groups, outputs)}, tensors)
        codes, zero = unpacked(tensors["qweight"]), unpacked(tensors["qzeros"])
        found = {"packed": integer.pack(codes.t(), 4), "scale": tensors["scales"].t().contiguous()}
        return found | {"zero": integer.pack_rows(zero.t(), 4)} | ({"bias": tensors["bias"]} if "bias" in tensors else {})

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        assert isinstance(storage, PackedInt)
        if outputs % 8:
            raise ValueError(f"{outputs} outputs do not fill words of eight, which awq needs; use compressed_tensors")
        codes = integer.unpack(tensors["packed"], 4, inputs)
        zero = torch.full((outputs, storage.grid.groups(inputs)), storage.grid.middle, dtype=torch.uint8, device=codes.device)
        if not storage.symmetric:
            zero = integer.unpack_rows(tensors["zero"], 4, outputs)
        found = {"qweight": packed(codes.t()), "qzeros": packed(zero.t()), "scales": tensors["scale"].t().contiguous()}
        return found | ({"bias": tensors["bias"]} if "bias" in tensors else {})

    def accepts(self, storage: Linear) -> list[str]:
        if not isinstance(storage, PackedInt):
            return [f"awq holds packed_int, not {storage.name}"]
        facts = {f"awq holds 4 bits, not {storage.bits}": storage.bits != 4, "awq holds groups of neighbouring inputs": storage.scattered}
        return [why for why, holds in facts.items() if holds]

    def config(self, storages: Mapping[str, Linear]) -> dict[str, Any]:
        """One group size for all modules. Raises ValueError where they differ."""
        sizes = {s.group_size or -1 for s in storages.values() if isinstance(s, PackedInt)}
        if len(sizes) > 1:
            raise ValueError(f"awq holds one group size, the model has {', '.join(map(str, sorted(sizes)))}; use compressed_tensors")
        plain = [name for name, storage in storages.items() if not isinstance(storage, PackedInt)]
        return {"quant_method": self.method, "bits": 4, "group_size": sizes.pop(), "zero_point": True, "version": "gemm",
                "modules_to_not_convert": plain or None}  # fmt: skip


def _either(config: Mapping[str, Any], *names: str) -> Any:
    """The first of several spellings of a field that is there."""
    return next((config[name] for name in names if name in config), None)


def unpacked(words: Tensor) -> Tensor:
    """int32 [rows, N / 8] -> uint8 [rows, N]."""
    return integer.unpack(words, 4, words.shape[1] * 8).unflatten(1, (-1, 8))[..., list(BACK)].flatten(1)


def packed(codes: Tensor) -> Tensor:
    """The inverse of ``unpacked``."""
    return integer.pack(codes.unflatten(1, (-1, 8))[..., list(ORDER)].flatten(1).contiguous(), 4)
