"""GGUF files as checkpoints: Hugging Face names and config over GGUF's own, blocks decoded by the ``gguf`` library.

The header is read here, not by the library's reader: that one makes a Python object of every token (seconds for a vocabulary) and
maps the whole file, and a file from a stranger must be checked before its sizes are believed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, TensorNameMap
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from zoo.checkpoint import Checkpoint, CheckpointError
from zoo.components.ops.rotary import frequencies
from zoo.components.rope_scaling.llama3 import Llama3
from zoo.components.spec import TensorInfo

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 4
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
    return metadata, _blocks(raw, start, header)


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
        block = Block(shape, GGMLQuantizationType(kind), start + offset, count // elements * size)
        if block.offset + block.bytes > header.size:
            raise CheckpointError(
                f"{header.name}: the file is cut short: tensor {name} ends at {block.offset + block.bytes} of {header.size}"
            )
        blocks[name] = block
    return blocks


class GGUFCheckpoint(Checkpoint):
    """A GGUF file of an architecture that a family of ours can read. Weights are decoded to fp32."""

    def __init__(self, path: Path, reference: str):
        self.path, self.reference = path, reference
        self.metadata, self._block = read_header(path)
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in CONFIGS:
            raise CheckpointError(f"{reference}: GGUF architecture {self.architecture!r} is not known; known: {', '.join(sorted(CONFIGS))}")
        try:
            self.config = CONFIGS[self.architecture](self)
            self._name = self._names()
        except (TypeError, ArithmeticError, AttributeError) as e:
            raise CheckpointError(f"{reference}: the metadata holds values of the wrong kind: {e}") from None
        self.dtype = torch.float32

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {ours: TensorInfo(self._block[theirs].shape, "float32") for ours, theirs in self._name.items()}

    def read(self, name: str) -> Tensor:
        block = self._block[self._name[name]]
        data = np.fromfile(self.path, np.uint8, block.bytes, offset=block.offset)
        if block.kind == GGMLQuantizationType.F32:
            values = data.view(np.float32)
        else:
            elements, size = GGML_QUANT_SIZES[block.kind]
            values = dequantize(data.reshape(-1, block.shape[-1] // elements * size), block.kind)
        return self._unpermute(name, torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(block.shape))

    @property
    def tokenizer(self) -> Any:
        from zoo.tokenizers import from_gguf

        return from_gguf(self.metadata)

    @property
    def generation(self) -> dict[str, Any]:
        ids = {k: self.metadata.get(f"tokenizer.ggml.{k}") for k in ("bos_token_id", "eos_token_id", "eot_token_id")}
        ends = list(dict.fromkeys(v for v in (ids["eos_token_id"], ids["eot_token_id"]) if v is not None))
        return {"bos_token_id": ids["bos_token_id"], "eos_token_id": ends}

    @property
    def files(self) -> list[Path]:
        return [self.path]

    def key(self, name: str, default: Any = None) -> Any:
        """A metadata value of the architecture, e.g. ``block_count``. Raises CheckpointError where it must be there and is not."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise CheckpointError(f"{self.reference}: the metadata has no {self.architecture}.{name}")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self._block

    def _names(self) -> dict[str, str]:
        """Name as Hugging Face has it -> name in the file."""
        if not 0 < self.key("block_count") <= len(self._block):
            raise CheckpointError(
                f"{self.reference}: {self.key('block_count')} layers are announced, the file has {len(self._block)} tensors"
            )
        arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        back = _reverse(TensorNameMap(arch, self.key("block_count")), self.key("block_count"))
        out = {}
        for theirs in self._block:
            stem, _, leaf = theirs.rpartition(".")
            if theirs in CONSUMED:
                continue
            out[f"{back[stem]}.{leaf}" if stem in back else theirs] = theirs
        return out

    def _unpermute(self, name: str, w: Tensor) -> Tensor:
        """llama.cpp stores q and k rows for interleaved rotation; give back the half layout."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        kind = name.split(".")[-2] if "." in name else ""
        if self.architecture != "llama" or kind not in heads:
            return w
        return w.unflatten(0, (self.config[heads[kind]], -1, 2)).transpose(1, 2).flatten(0, 2)


CONSUMED = frozenset({"rope_freqs.weight"})
HF_NAMES = ("model.embed_tokens", "model.norm", "lm_head", *(f"model.layers.{{bid}}.{n}" for n in (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")))  # fmt: skip


def _reverse(table: TensorNameMap, blocks: int) -> dict[str, str]:
    """GGUF stem -> Hugging Face stem, through the library's own name map."""
    names = [n.format(bid=b) for n in HF_NAMES for b in (range(blocks) if "{bid}" in n else [0])]
    return {gguf: n for n in names if (gguf := table.get_name(n)) is not None}


def _llama(file: GGUFCheckpoint) -> dict[str, Any]:
    """Metadata of architecture ``llama`` -> a LlamaForCausalLM config."""
    width, heads = file.key("embedding_length"), file.key("attention.head_count")
    head_dim = file.key("attention.key_length", file.key("rope.dimension_count", width // heads))
    theta = float(file.key("rope.freq_base", 10_000.0))
    vocab = file._block["token_embd.weight"].shape[0] if file.has("token_embd.weight") else file.key("vocab_size")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": file.key("feed_forward_length"),
        "num_hidden_layers": file.key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.key("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.key("context_length", 2048),
        "rms_norm_eps": round(float(file.key("attention.layer_norm_rms_epsilon")), 12),
        "hidden_act": "silu",
        "attention_bias": file.has("blk.0.attn_q.bias"),
        "mlp_bias": file.has("blk.0.ffn_up.bias"),
        "tie_word_embeddings": not file.has("output.weight"),
        "rope_theta": theta,
        "rope_scaling": _scaling(file, theta, head_dim),
        "torch_dtype": "float32",
    }
    tokens = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return config | {k: file.metadata[f"tokenizer.ggml.{v}"] for k, v in tokens.items() if f"tokenizer.ggml.{v}" in file.metadata}


def _scaling(file: GGUFCheckpoint, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Rope scaling from the metadata, or from the divisors that Llama 3 files carry as a tensor."""
    if file.has("rope_freqs.weight"):
        return _llama3_scaling(file, theta, head_dim)
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    original = file.key("rope.scaling.original_context_length", file.key("context_length", 2048))
    return {"rope_type": kind, "factor": file.key("rope.scaling.factor"), "original_max_position_embeddings": original}


def _llama3_scaling(file: GGUFCheckpoint, theta: float, head_dim: int) -> dict[str, Any]:
    """The published Llama 3 setting whose divisors the file holds."""
    block = file._block["rope_freqs.weight"]
    held = torch.from_numpy(np.fromfile(file.path, np.float32, math.prod(block.shape), offset=block.offset))
    for factor in (8.0, 16.0, 32.0):
        setting = Llama3(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, context=8192)
        if torch.allclose(frequencies(theta, head_dim) / setting.frequencies(theta, head_dim, None), held, rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192}  # fmt: skip
    raise CheckpointError(f"{file.reference}: rope_freqs.weight holds divisors of no published Llama 3 setting")


CONFIGS = {MODEL_ARCH_NAMES[MODEL_ARCH.LLAMA]: _llama}
