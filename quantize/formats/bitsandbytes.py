"""bitsandbytes checkpoints as transformers writes them: 4 bits (NF4, FP4) or 8 (LLM.int8).

Shapes: N outputs, K inputs. 4 bits: ``weight`` [ceil(N K / 2), 1] uint8, ``weight.absmax``, ``weight.quant_map`` [16] float32,
``weight.quant_state.bitsandbytes__nf4`` (or fp4), JSON in bytes, and for double quantization ``weight.nested_absmax`` and
``weight.nested_quant_map`` [256] float32. 8 bits: ``weight`` [N, K] int8, ``SCB`` [N] float32, ``weight_format`` uint8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import regex
import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.bnb_4bit import BlockSize, BnB4Bit, Compute
from zoo.components.linear.llm_int8 import LLMInt8
from zoo.components.numerics import blockwise
from zoo.components.registry import part
from zoo.components.spec import TensorInfo, load
from zoo.formats import SECONDS, Format, check_values, member, words

PLACE = "quantization_config"
ABSMAX, SCB = "weight.absmax", "SCB"
ROW_MAJOR = 0  # ``weight_format``: the only layout that is still written
CLOSE = 1e-6  # of tables, which are stored but fixed


@part(Format, "bitsandbytes", source="bitsandbytes 0.50, QuantState.as_dict and Linear8bitLt; transformers BitsAndBytesConfig")
@dataclass(frozen=True, kw_only=True)
class BitsAndBytesFormat(Format):
    """NF4, FP4 and LLM.int8; read by transformers and vLLM.

    One config holds for all quantized modules: 4 bits of one codebook, or 8 bits of one threshold.
    """

    method = "bitsandbytes"

    def storage(self, config: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> Linear | None:
        four, eight = (member(config, f"load_in_{bits}bit", bool, False, PLACE) for bits in (4, 8))
        if four == eight:
            raise ValueError(f"{PLACE}: one of load_in_4bit and load_in_8bit must be true, they are {four} and {eight}")
        if tensors and (ABSMAX if four else SCB) not in tensors:
            return None
        if not tensors and _skipped(module, words(config, "llm_int8_skip_modules", PLACE)):
            return None
        return _four(config, tensors) if four else _eight(config)

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        if isinstance(storage, LLMInt8):
            return ["weight", SCB, "weight_format", *(["bias"] if bias else [])]
        assert isinstance(storage, BnB4Bit)
        nested = ["weight.nested_absmax", "weight.nested_quant_map"] if storage.nested else []
        return ["weight", ABSMAX, "weight.quant_map", *nested, _state_name(storage), *(["bias"] if bias else [])]

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        bias = {"bias": tensors["bias"]} if "bias" in tensors else {}
        if isinstance(storage, LLMInt8):
            if tensors["weight_format"].flatten().tolist() != [ROW_MAJOR]:
                raise ValueError(f"weight_format is {tensors['weight_format'].tolist()!r:.60}, only {ROW_MAJOR} (row by row) is supported")
            return _checked({"weight": tensors["weight"], "absmax": tensors[SCB]}, storage, inputs, outputs) | bias
        assert isinstance(storage, BnB4Bit)
        state = _state(tensors[_state_name(storage)])
        _check_state(state, tensors, storage, inputs, outputs)
        found = {"packed": tensors["weight"].flatten().view(torch.uint8), "absmax": tensors[ABSMAX]}
        if storage.nested:
            found |= {"nested_absmax": tensors["weight.nested_absmax"], "offset": torch.tensor([float(state["nested_offset"])])}
        return _checked(found, storage, inputs, outputs) | bias

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        bias = {"bias": tensors["bias"]} if "bias" in tensors else {}
        if isinstance(storage, LLMInt8):
            return {"weight": tensors["weight"], SCB: tensors["absmax"], "weight_format": torch.tensor(ROW_MAJOR, dtype=torch.uint8)} | bias
        assert isinstance(storage, BnB4Bit)
        device = tensors["packed"].device
        state: dict[str, Any] = {"quant_type": storage.codebook, "blocksize": storage.block_size, "dtype": "float32",
                                 "shape": [outputs, inputs]}  # fmt: skip
        nested = {}
        if storage.nested:
            state |= {"nested_blocksize": blockwise.NESTED, "nested_dtype": "float32", "nested_offset": float(tensors["offset"])}
            nested = {"weight.nested_absmax": tensors["nested_absmax"], "weight.nested_quant_map": blockwise.dynamic(device).clone()}
        return {
            "weight": tensors["packed"][:, None],
            ABSMAX: tensors["absmax"],
            "weight.quant_map": blockwise.codebook(storage.codebook, device).clone(),  # files hold no tensor twice
            **nested,
            _state_name(storage): torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
            **bias,
        }

    def accepts(self, storage: Linear) -> list[str]:
        return [] if isinstance(storage, BnB4Bit | LLMInt8) else [f"bitsandbytes holds bnb_4bit and llm_int8, not {storage.name}"]

    def config(self, storages: Mapping[str, Linear]) -> dict[str, Any]:
        """Raises ValueError where modules differ in more than their block size."""
        kinds = {_kind(s) for s in storages.values() if isinstance(s, BnB4Bit | LLMInt8)}
        if len(kinds) > 1:
            raise ValueError(f"bitsandbytes holds one kind of storage, the model has {' and '.join(sorted(map(str, kinds)))}")
        kind = kinds.pop()
        plain = [name for name, storage in storages.items() if not isinstance(storage, BnB4Bit | LLMInt8)]
        four = kind if isinstance(kind, BnB4Bit) else None
        return {
            "quant_method": self.method,
            "load_in_4bit": four is not None,
            "load_in_8bit": four is None,
            "llm_int8_threshold": kind.threshold if isinstance(kind, LLMInt8) else LLMInt8().threshold,
            "llm_int8_skip_modules": [regex.escape(name) for name in plain],
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            **({"bnb_4bit_quant_type": four.codebook, "bnb_4bit_use_double_quant": four.nested,
                "bnb_4bit_compute_dtype": four.compute, "bnb_4bit_quant_storage": "uint8"} if four else {}),
        }  # fmt: skip


def _eight(config: Mapping[str, Any]) -> LLMInt8:
    threshold = config.get("llm_int8_threshold", LLMInt8().threshold)
    if type(threshold) not in (int, float):
        raise ValueError(f"{PLACE}.llm_int8_threshold must be a number, it is {threshold!r:.60}")
    return load(LLMInt8, {"threshold": threshold}, PLACE)


def _four(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> BnB4Bit:
    """The storage of 4 bits that a config and, where they are known, the tensors' shapes tell of."""
    kind, compute = config.get("bnb_4bit_quant_type", "fp4"), config.get("bnb_4bit_compute_dtype")
    for field, value, known in (("quant_type", kind, get_args(blockwise.Codebook)), ("compute_dtype", compute, (None, *get_args(Compute)))):
        if value not in known:
            raise ValueError(f"{PLACE}.bnb_4bit_{field}: {value!r:.60} is not supported; supported: {', '.join(map(str, known))}")
    nested = "weight.nested_absmax" in tensors if tensors else member(config, "bnb_4bit_use_double_quant", bool, False, PLACE)
    plain = BnB4Bit(codebook=kind, nested=nested, compute=compute)
    if not tensors:
        return plain
    packed, blocks = tensors["weight"], math.prod(tensors[ABSMAX].shape)
    count = 2 * math.prod(packed.shape) * getattr(torch, packed.dtype or "uint8").itemsize
    sizes = [size for size in (plain.block_size, *get_args(BlockSize)) if blockwise.blocks(count, size) == blocks]
    if not sizes:
        raise ValueError(f"{ABSMAX} holds {blocks} scales for {count} weights, which no block size of bitsandbytes makes")
    return replace(plain, block_size=sizes[0])


def _kind(storage: BnB4Bit | LLMInt8) -> BnB4Bit | LLMInt8:
    """What the config says of a storage."""
    if isinstance(storage, LLMInt8):
        return LLMInt8(threshold=storage.threshold)
    return BnB4Bit(codebook=storage.codebook, nested=storage.nested, compute=storage.compute)


def _skipped(module: str, patterns: list[str]) -> bool:
    """Whether transformers leaves a module plain; without patterns it keeps the head."""
    rule = "|".join(f"(?:{pattern})" for pattern in patterns or ["lm_head"])
    try:
        found = regex.match(rf"(?:{rule})(?:(?<=\.)|(?=\.|$))", module, timeout=SECONDS)
    except (regex.error, TimeoutError) as e:
        raise ValueError(f"{PLACE}.llm_int8_skip_modules cannot be matched ({e})") from None
    return found is not None or any(module.endswith(pattern) for pattern in patterns or ["lm_head"])


def _state_name(storage: BnB4Bit) -> str:
    return f"weight.quant_state.bitsandbytes__{storage.codebook}"


def _state(tensor: Tensor) -> dict[str, Any]:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise ValueError(f"weight.quant_state is {given}, it must be bytes, uint8 of one dimension; download the file again")
    try:
        found = json.loads(bytes(tensor.tolist()))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"weight.quant_state is no JSON ({e}); download the file again") from None
    if not isinstance(found, dict):
        raise ValueError(f"weight.quant_state must be a JSON object, it is a {type(found).__name__}")
    return found


def _check_state(state: Mapping[str, Any], tensors: Mapping[str, Tensor], storage: BnB4Bit, inputs: int, outputs: int) -> None:
    """Raise ValueError for a state that is not the storage's, and for other tables than bitsandbytes' own."""
    one = blockwise.blocks(inputs * outputs, storage.block_size) == 1  # one block is the same whatever its size
    wanted: dict[str, Any] = {"quant_type": storage.codebook, "shape": [outputs, inputs]} | (
        {} if one else {"blocksize": storage.block_size}
    )
    tables = {"weight.quant_map": blockwise.codebook(storage.codebook, torch.device("cpu"))}
    if storage.nested:
        wanted["nested_blocksize"] = blockwise.NESTED
        tables["weight.nested_quant_map"] = blockwise.dynamic(torch.device("cpu"))
        offset: Any = state.get("nested_offset")
        if type(offset) not in (int, float) or not abs(offset) <= torch.finfo(torch.float32).max:
            raise ValueError(f"weight.quant_state has no finite number nested_offset but {offset!r:.60}")
    for field, value in wanted.items():
        if state.get(field) != value:
            raise ValueError(f"weight.quant_state.{field} is {state.get(field)!r:.60}, it must be {value}")
    for name, table in tables.items():
        if tensors[name].shape != table.shape or not torch.allclose(tensors[name].float().cpu(), table, rtol=0, atol=CLOSE):
            raise ValueError(f"{name} is not the table of {storage.codebook}; other codebooks are not supported")


def _checked(found: dict[str, Tensor], storage: Linear, inputs: int, outputs: int) -> dict[str, Tensor]:
    for name, info in storage.own_tensors(inputs, outputs, False).items():
        kind = str(found[name].dtype).removeprefix("torch.")
        if (found[name].shape, kind) != (info.shape, info.dtype):
            raise ValueError(f"the {name} of the weight is {kind} {list(found[name].shape)}, it must be {info.dtype} {list(info.shape)}")
    check_values(storage, found, {"absmax": SCB if isinstance(storage, LLMInt8) else ABSMAX, "nested_absmax": "weight.nested_absmax"})
    return found
