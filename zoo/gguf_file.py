"""GGUF files as checkpoints: Hugging Face names and config over GGUF's own, blocks decoded by the ``gguf`` library.

The header is read here, not by the library's reader: that one makes a Python object of every token (seconds for a vocabulary) and
maps the whole file, and a file from a stranger must be checked before its sizes are believed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, TensorNameMap
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from zoo.checkpoint import Checkpoint, CheckpointError
from zoo.components.spec import TensorInfo
from zoo.family import family_for
from zoo.gguf_architectures import ARCHITECTURES, CONSUMED, Described
from zoo.layouts import rope_rows
from zoo.weights import written_out

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 4
NAMED = 8  # tensors, in a message
FLOATS = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}


@dataclass(frozen=True)
class Block:
    """Where a tensor lies in the file. shape: rows first, as torch has it. kind: its block type."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    bytes: int


class _Header:
    """A cursor over the header that refuses to believe sizes beyond the file's end."""

    def __init__(self, file: BinaryIO, size: int, name: str):
        self.file, self.size, self.name = file, size, name

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise CheckpointError(f"{self.name}: the file is cut short: {count} bytes are wanted at {self.file.tell()} of {self.size}")
        return self.file.read(count)

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth > 2:
            raise CheckpointError(f"{self.name}: value type {kind} at byte {self.file.tell()} is not GGUF")
        inner, count = self.number("I"), self.number("Q")
        if inner in SCALARS:
            width = struct.calcsize("<" + SCALARS[inner])
            return list(struct.unpack(f"<{count}{SCALARS[inner]}", self.take(count * width)))
        self.check_count(count, 8)
        return [self.value(inner, depth + 1) for _ in range(count)]

    def check_count(self, count: int, least: int) -> None:
        """``count`` items of at least ``least`` bytes must fit in what is left of the file."""
        if count * least > self.size - self.file.tell():
            raise CheckpointError(f"{self.name}: {count} items are announced at byte {self.file.tell()}, more than the file holds")


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Block]]:
    """Metadata and tensor places of a GGUF file (version 2 or 3, little endian). Raises CheckpointError for anything else."""
    with path.open("rb") as file:
        header = _Header(file, path.stat().st_size, path.name)
        if header.take(4) != b"GGUF":
            raise CheckpointError(f"{path.name}: not a GGUF file (it does not begin with GGUF)")
        version = header.number("I")
        if version not in (2, 3):
            raise CheckpointError(f"{path.name}: GGUF version {version} is not supported; supported: 2 and 3, little endian")
        tensors, keys = header.number("Q"), header.number("Q")
        header.check_count(keys, 13)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = header.string()
            metadata[key] = header.value(header.number("I"))
        header.check_count(tensors, 24)
        raw = [_tensor_info(header) for _ in range(tensors)]
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise CheckpointError(f"{path.name}: general.alignment is {align!r}")
        start = -(-file.tell() // align) * align
    blocks = _blocks(raw, start, header)
    _check_kinds(blocks, header)
    _check_places(blocks, start, align, header)
    return metadata, blocks


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value part of a GGUF header."""
    return read_header(path)[0]


def _tensor_info(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    name, dims = header.string(), header.number("I")
    if not 1 <= dims <= MAX_DIMS:
        raise CheckpointError(f"{header.name}: tensor {name} has {dims} dimensions")
    shape = tuple(header.number("Q") for _ in range(dims))
    return name, shape[::-1], header.number("I"), header.number("Q")


def _blocks(raw: list[tuple[str, tuple[int, ...], int, int]], start: int, header: _Header) -> dict[str, Block]:
    blocks: dict[str, Block] = {}
    for name, shape, kind, offset in raw:
        if kind not in {t.value for t in GGML_QUANT_SIZES}:
            raise CheckpointError(f"{header.name}: tensor {name} has block type {kind}, which is not known")
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        count = math.prod(shape)
        if name in blocks or shape[-1] % elements:
            raise CheckpointError(f"{header.name}: tensor {name} {'appears twice' if name in blocks else f'has rows of {shape[-1]}'}")
        blocks[name] = Block(shape, GGMLQuantizationType(kind), start + offset, count // elements * size)
    return blocks


def _check_places(blocks: Mapping[str, Block], start: int, align: int, header: _Header) -> None:
    """Raise CheckpointError for a tensor that is not aligned, ends beyond the file, or has bytes of another one."""
    end, before = start, ""
    for name, block in sorted(blocks.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        at = f"{header.name}: tensor {name} begins at byte {block.offset}"
        if (block.offset - start) % align:
            raise CheckpointError(f"{at}, {block.offset - start} after the header, which is no multiple of general.alignment {align}; "
                                  "the file is damaged: download it again")  # fmt: skip
        if block.offset + block.bytes > header.size:
            raise CheckpointError(
                f"{header.name}: the file is cut short: tensor {name} ends at {block.offset + block.bytes} of {header.size}"
            )
        if block.offset < end:
            raise CheckpointError(f"{at}, inside tensor {before}, which ends at {end}; the file is damaged: download it again")
        end, before = block.offset + block.bytes, name


def _check_kinds(blocks: Mapping[str, Block], header: _Header) -> None:
    """Raise CheckpointError, naming all of them, for tensors whose blocks cannot be decoded."""
    wrong = [f"{name} ({block.kind.name})" for name, block in blocks.items() if not decodable(block.kind)]
    if wrong:
        known = ", ".join(kind.name for kind in GGML_QUANT_SIZES if decodable(kind))
        more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise CheckpointError(f"{header.name}: {', '.join(wrong[:NAMED])}{more}: blocks that cannot be decoded to weights; "
                              f"known: {known}. Take or make a file in one of these")  # fmt: skip


@cache
def decodable(kind: GGMLQuantizationType) -> bool:
    """Whether the library turns blocks of a kind into numbers; it says so only where it is asked to."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


class GGUFCheckpoint(Checkpoint, Described):
    """A GGUF file of an architecture that a family of ours can read. Weights are decoded to float32."""

    def __init__(self, path: Path, reference: str):
        self.path, self.reference = path, reference
        self.metadata, self._block = read_header(path)
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise CheckpointError(f"{reference}: GGUF architecture {self.architecture!r} is not known; known: {known}")
        self.kind = ARCHITECTURES[self.architecture]
        try:
            self.config = self.kind.config(self)
            self._name = self._names()
        except CheckpointError:
            raise
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, NotImplementedError) as e:
            raise CheckpointError(f"{reference}: the metadata holds values that no model can have: {type(e).__name__}: {e}") from None
        self.dtype = torch.float32

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {ours: TensorInfo(self._block[theirs].shape, "float32") for ours, theirs in self._name.items()}

    def read(self, name: str) -> Tensor:
        values = self.values(self._name[name])
        module, _, leaf = name.rpartition(".")
        if self.kind.norm_offset and leaf == "weight" and module.endswith("norm"):
            return values - self.kind.norm_offset
        heads = self._heads.get(module.rpartition(".")[2])
        return rope_rows(heads).forward([values])[0] if self.kind.permuted and heads else values

    @property
    def _heads(self) -> dict[str, int]:
        """Heads of the projections whose rows llama.cpp turns into interleaved pairs."""
        return {"q_proj": self.config["num_attention_heads"], "k_proj": self.config["num_key_value_heads"]}

    def values(self, tensor: str) -> Tensor:
        block = self._block[tensor]
        data = np.fromfile(self.path, np.uint8, block.bytes, offset=block.offset)
        if block.kind == GGMLQuantizationType.F32:
            values = data.view(np.float32)
        else:
            elements, size = GGML_QUANT_SIZES[block.kind]
            values = dequantize(data.reshape(-1, block.shape[-1] // elements * size), block.kind)
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(block.shape)

    @property
    def tokenizer(self) -> Any:
        from zoo.tokenizers import from_gguf

        try:
            return from_gguf(self.metadata)
        except CheckpointError as e:
            raise type(e)(f"{self.reference}: {e}") from None

    @property
    def generation(self) -> dict[str, Any]:
        ids = {k: self.metadata.get(f"tokenizer.ggml.{k}") for k in ("bos_token_id", "eos_token_id", "eot_token_id")}
        ends = list(dict.fromkeys(v for v in (ids["eos_token_id"], ids["eot_token_id"]) if v is not None))
        return {"bos_token_id": ids["bos_token_id"], "eos_token_id": ends}

    @property
    def files(self) -> list[Path]:
        return [self.path]

    def has(self, tensor: str) -> bool:
        return tensor in self._block

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._block[tensor].shape

    def _names(self) -> dict[str, str]:
        """Name as Hugging Face has it -> name in the file; tensors of no known name keep their own."""
        layers = self.config["num_hidden_layers"]
        if not 0 < layers <= len(self._block):
            raise CheckpointError(f"{self.reference}: {layers} layers are announced, the file has {len(self._block)} tensors")
        family = family_for(self.config, self.reference)
        spec = family.read(self.config)
        arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        table = TensorNameMap(arch, layers)
        theirs = [name for entry in written_out(spec, family.rules(spec)) for name in entry.theirs]
        known = {f"{stem}.{name.rpartition('.')[2]}": name for name in theirs if (stem := table.get_name(name.rpartition(".")[0]))}
        return {known.get(name, name): name for name in self._block if name not in CONSUMED}
