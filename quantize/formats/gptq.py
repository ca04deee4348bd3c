"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them: version 1, whose zero points are stored less one, and version 2.

Shapes: N outputs, K inputs, G groups. ``qweight`` int32 [K * bits / 32, N], ``qzeros`` int32 [G, N * bits / 32], ``scales`` [G, N],
``g_idx`` int32 [K]: the group of each input. ``qweight`` and ``qzeros`` are dense streams of bits, the first code lowest, along K and N:
those of our canonical layout, turned.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.packed_int import PackedInt
from zoo.components.numerics import integer
from zoo.components.registry import part
from zoo.components.spec import TensorInfo, load
from zoo.formats import Format, check_shapes, check_values, expression, member

BITS = (2, 3, 4, 8)
PLACE = "quantization_config"
FIELDS = ("bits", "group_size", "sym", "desc_act")  # that a rule of ``dynamic`` may set


@part(Format, "gptq", source="AutoGPTQ and GPTQModel, checkpoint_format gptq")
@dataclass(frozen=True, kw_only=True)
class GPTQFormat(Format):
    """Version 1: zero points are stored less one, so that zero point 0 cannot be written. Read by vLLM, SGLang and transformers."""

    method = "gptq"
    version: ClassVar[str] = "gptq"
    less: ClassVar[int] = 1  # what is stored of a zero point is less by this

    def answers(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == self.method and _version(config) == self.version

    def storage(self, config: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> PackedInt | None:
        settings = _settings(config, module)
        if settings is None or (tensors and "qweight" not in tensors):
            return None
        size, bits = settings["group_size"], settings["bits"]
        scale = tensors.get("scales", TensorInfo((), "float16")).dtype
        scattered = bool(settings["desc_act"]) and size != -1
        wanted = {"bits": bits, "group_size": None if size == -1 else size, "symmetric": settings["sym"], "scale_dtype": scale}
        return load(PackedInt, wanted | {"scattered": scattered}, PLACE)

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        return ["qweight", "qzeros", "scales", "g_idx", *(["bias"] if bias else [])]

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        assert isinstance(storage, PackedInt)
        check_shapes(self._shapes(storage, inputs, outputs), tensors)
        found = {"packed": tensors["qweight"].t().contiguous(), "scale": tensors["scales"].t().contiguous()}
        zero = integer.unpack(tensors["qzeros"], storage.bits, outputs)
        if storage.symmetric:
            self._check_middle(storage, zero)
        else:
            found["zero"] = tensors["qzeros"].t().contiguous() if not self.less else self._moved(zero, storage.bits, self.less)
        if storage.scattered:
            found["group_index"] = tensors["g_idx"]
            check_values(storage, found, {"group_index": "g_idx"})
        elif not torch.equal(tensors["g_idx"], _neighbours(storage, inputs)):
            raise ValueError(f"g_idx puts inputs into groups of their own, but {PLACE}.desc_act is false; set it to true")
        return found | ({"bias": tensors["bias"]} if "bias" in tensors else {})

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        assert isinstance(storage, PackedInt)
        for what, size in (("inputs", inputs), ("outputs", outputs)):
            if size * storage.bits % 32:
                raise ValueError(f"{size} {what} of {storage.bits} bits do not fill words of 32 bits; use compressed_tensors")
        groups = storage.grid.groups(inputs)
        zero = torch.full((outputs, groups), storage.grid.middle, dtype=torch.uint8, device=tensors["packed"].device)
        if not storage.symmetric:
            zero = integer.unpack_rows(tensors["zero"], storage.bits, outputs)
        if self.less and bool((zero == 0).any()):
            raise ValueError("a zero point is 0, which version 1 of gptq cannot hold; write gptq_v2 or compressed_tensors")
        index = tensors["group_index"] if storage.scattered else _neighbours(storage, inputs)
        found = {
            "qweight": tensors["packed"].t().contiguous(),
            "qzeros": integer.pack((zero - self.less).t(), storage.bits),
            "scales": tensors["scale"].t().contiguous(),
            "g_idx": index.to(tensors["packed"].device),
        }
        return found | ({"bias": tensors["bias"]} if "bias" in tensors else {})

    def accepts(self, storage: Linear) -> list[str]:
        if not isinstance(storage, PackedInt):
            return [f"gptq holds packed_int, not {storage.name}"]
        return [] if storage.bits in BITS else [f"gptq holds {', '.join(map(str, BITS))} bits, not {storage.bits}"]

    def config(self, storages: Mapping[str, Linear]) -> dict[str, Any]:
        """The most frequent settings for all, the other modules by rules of ``dynamic``: ``+:`` with settings, ``-:`` for plain ones."""
        packed = {name: _fields(s) for name, s in storages.items() if isinstance(s, PackedInt)}
        kinds = [tuple(kind.items()) for kind in packed.values()]
        base = dict(max(set(kinds), key=kinds.count))
        rules: dict[str, Any] = {f"-:^{_escaped(name)}$": {} for name in storages if name not in packed and not name.endswith("lm_head")}
        rules |= {f"+:^{_escaped(name)}$": kind for name, kind in packed.items() if kind != base}
        return {
            "quant_method": self.method,
            "checkpoint_format": self.version,
            **base,
            "lm_head": any(name.endswith("lm_head") for name in packed),
            "pack_dtype": "int32",
            **({"dynamic": rules} if rules else {}),
        }

    def _shapes(self, storage: PackedInt, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        groups, words = storage.grid.groups(inputs), integer.packed_size(outputs, storage.bits)
        return {"qweight": (integer.packed_size(inputs, storage.bits), outputs), "qzeros": (groups, words), "scales": (groups, outputs),
                "g_idx": (inputs,)}  # fmt: skip

    def _moved(self, zero: Tensor, bits: int, by: int) -> Tensor:
        """Zero points [G, N] as stored, ``by`` added, in our layout. One that was 0 had wrapped to the largest code, and returns."""
        return integer.pack_rows((zero + by & 2**bits - 1).t(), bits)

    def _check_middle(self, storage: PackedInt, zero: Tensor) -> None:
        """Raise ValueError unless all zero points are the middle; warn where they are those of the other version, which symmetric
        weights can tell."""
        middle = storage.grid.middle
        if bool((zero == middle - self.less).all()):
            return
        if not bool((zero == middle - 1 + self.less).all()):
            raise ValueError(f"{PLACE}.sym is true, but the zero points in qzeros differ; set it to false")
        other = "gptq_v2" if self.less else "gptq"
        warnings.warn(f"qzeros holds the zero points of {other}, but {PLACE} says {self.version}; they are read as {other}", stacklevel=2)


def _version(config: Mapping[str, Any]) -> Any:
    """The word for the layout, whatever its type; older files have none."""
    found = (config.get(field) for field in ("checkpoint_format", "format"))
    return next((word for word in found if word is not None), "gptq")


def _settings(config: Mapping[str, Any], module: str) -> dict[str, Any] | None:
    """bits, group_size, sym and desc_act of a module, None where it is not quantized. Raises ValueError naming what is not understood."""
    base = {name: config.get(name) for name in FIELDS}
    if module.endswith("lm_head") and not member(config, "lm_head", bool, False, PLACE):
        return None
    rules = member(config, "dynamic", Mapping, {}, PLACE)
    for pattern in rules:
        if not expression(str(pattern).removeprefix("+:").removeprefix("-:"), module, f"{PLACE}.dynamic"):
            continue
        if str(pattern).startswith("-:"):
            return None
        base |= {name: member(rules, pattern, Mapping, {}, f"{PLACE}.dynamic").get(name, base[name]) for name in FIELDS}
        break
    problems = list(_problems(base | {"pack_dtype": config.get("pack_dtype")}))
    if problems:
        raise ValueError("; ".join(f"{PLACE}.{p}" for p in problems))
    return base | {"sym": base["sym"] is not False, "desc_act": base["desc_act"] is True}


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    allowed = {"sym": (True, False, None), "desc_act": (True, False, None), "pack_dtype": ("int32", None)}
    if type(values["bits"]) is not int or values["bits"] not in BITS:
        yield f"bits: {values['bits']!r:.60} is not supported; supported: {', '.join(map(str, BITS))}"
    size = values["group_size"]
    if type(size) is not int or not (size == -1 or size > 0):
        yield f"group_size must be a positive number or -1, it is {size!r:.60}"
    for name, known in allowed.items():
        if not any(values[name] is k or (isinstance(k, str) and values[name] == k) for k in known):
            yield f"{name}: {values[name]!r:.60} is not supported; supported: {', '.join(str(k).lower() for k in known if k is not None)}"


def _fields(storage: PackedInt) -> dict[str, Any]:
    return {"bits": storage.bits, "group_size": storage.group_size or -1, "sym": storage.symmetric, "desc_act": storage.scattered}


def _neighbours(storage: PackedInt, inputs: int) -> Tensor:
    """The group of each input where groups are runs of neighbours, int32 [K]."""
    return (torch.arange(inputs) // (storage.group_size or inputs)).to(torch.int32)


def _escaped(name: str) -> str:
    return name.replace(".", r"\.")
