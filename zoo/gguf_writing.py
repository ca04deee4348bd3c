"""``zoo.save(..., format="gguf")``: a model as one file for llama.cpp."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType, TensorNameMap
from gguf.constants import GGML_QUANT_SIZES

from zoo.checkpoint import Checkpoint, CheckpointError, NoTokenizer
from zoo.components import registry
from zoo.components.contracts import Linear, StoredLinear
from zoo.components.linear.dense import Dense
from zoo.family import Family
from zoo.gguf_architectures import ARCHITECTURES
from zoo.gguf_blocks import BLOCKS, DTYPES, WORDS, packed_bytes, packed_kind, plain_bytes, plain_kind
from zoo.gguf_file import GGUFCheckpoint
from zoo.gguf_metadata import Planned, architecture_name, plan
from zoo.gguf_tokenizers import to_gguf
from zoo.layouts import rope_rows
from zoo.model import Model
from zoo.replacing import beside
from zoo.storages import plain_spec
from zoo.weights import Entry, entries, linears
from zoo.wrapped import Wrapped

HEADS = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}  # modules whose rows are turned into pairs
OUTER = ("embed.", "head.")
FILE_TYPES = {"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_S", "MXFP4": "MOSTLY_MXFP4_MOE"}  # where the name does not follow from the blocks'
VALUES = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING,
          list: GGUFValueType.ARRAY}  # fmt: skip
READ = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")  # architectures that transformers knows
SIZED = ("qwen2", "qwen3")  # of which it works out the width of heads by itself
QWEN3_HEAD = 128


@dataclass(frozen=True)
class Weight:
    """A tensor of the file: its name there, shape and blocks, its entry in the table of the family, and how it is packed if it is."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    entry: Entry
    storage: Linear | None

    @property
    def row_bytes(self) -> int:
        elements, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // elements * size


def write(model: Model, path: Path, family: Family, blocks: str | None, check: Callable[[Path], object] | None) -> str | None:
    """Write the file beside ``path`` and move it there. Returns why transformers cannot run it, None where it can.

    Raises ValueError, before anything is written, for a model that a GGUF file cannot hold; see ``zoo.save``.
    """
    name = architecture_name(family)
    weights = planned_weights(model, family, name, blocks)
    planned = plan(plain_spec(model.spec), family, {weight.name: weight.shape for weight in weights})
    tokens = tokenizer_keys(model)
    with beside(path) as aside:
        scratch = aside / path.name
        _write(model, scratch, planned, weights, tokens)
        if check is not None:
            check(scratch)
        scratch.replace(path)
    return unread(planned, any(weight.name.endswith(".bias") for weight in weights))


def unread(planned: Planned, biased: bool) -> str | None:
    """What transformers 5.24 would take wrongly of a file, None where it reads all of it."""
    name, width = planned.architecture, planned.key("attention.key_length")
    usual = QWEN3_HEAD if name == "qwen3" else planned.key("embedding_length") // planned.key("attention.head_count")
    facts = {
        f"knows no architecture {name}": name not in READ,
        "passes over rope scaling": planned.consumed or any(".rope.scaling." in key for key in planned.metadata),
        "passes over the biases of LLaMA": name == "llama" and biased,
        f"takes heads to be {usual} wide, not {width}": width != usual and name in SIZED,
    }
    found = [why for why, holds in facts.items() if holds]
    return f"its reader of GGUF {', and '.join(found)}" if found else None


def check_file(path: Path, overwrite: bool) -> None:
    """Raise FileExistsError unless a GGUF file may be written to ``path``, ValueError for a name that is not one's."""
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: a GGUF file is named NAME.gguf; choose such a name, or another format")
    if path.is_dir() or (path.exists() and not overwrite):
        what = (
            "is a folder; choose another name" if path.is_dir() else "is there; choose another name, or have it replaced by overwrite=True"
        )
        raise FileExistsError(f"{path} {what}")
    if path.exists() and not _is_gguf(path):
        raise FileExistsError(f"{path} is never replaced, because it is no GGUF file; choose another name")


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


# ---- what is written ---------------------------------------------------------------------------------------------------------


def planned_weights(model: Model, family: Family, name: str, blocks: str | None) -> list[Weight]:
    """Every tensor of the file. Raises ValueError listing all that cannot be written."""
    wanted, spec = DTYPES[model.dtype] if blocks is None else block_kind(blocks), plain_spec(model.spec)
    packed = {f"{path}.weight": child.spec for path, child in linears(model.spec) if isinstance(child.spec, Linear)}
    names, shapes, found, problems = tensor_names(name, len(spec.layers)), spec.tensors(), [], []
    for entry in entries(spec, family.rules(spec)):
        ours, theirs = entry.ours[0], names(entry.theirs[0])
        if theirs is None or len(entry.ours) != 1:
            problems.append(f"{ours}: {name} files have no tensor for it")
            continue
        shape, storage = shapes[ours].shape, packed.get(ours)
        storage = None if storage == Dense() else storage
        kind = plain_kind(shape, wanted, ours.startswith(OUTER))
        try:
            kind = packed_kind(storage, stored_module(model, ours).canonical(), shape[1]) if storage else kind
        except ValueError as e:
            problems.append(f"{ours.removesuffix('.weight')}: {e}")
        found.append(Weight(theirs, shape, kind, entry, storage))
    if problems:
        raise ValueError(f"a GGUF file cannot hold this model: {'; '.join(problems)}. Packed weights are never rounded again: write a "
                         "model that was loaded with quantized='dequantize', or another format")  # fmt: skip
    return found


def block_kind(word: str) -> GGMLQuantizationType:
    if word.lower() not in BLOCKS:
        raise ValueError(f"blocks: there are none named {word!r}{registry.nearest(word.lower(), BLOCKS)}; known: {', '.join(BLOCKS)}")
    return WORDS[word.lower()]


def stored_module(model: Model, name: str) -> StoredLinear:
    module = model.get_submodule(name.removesuffix(".weight"))
    assert isinstance(module, StoredLinear)
    return module


def tensor_names(name: str, layers: int) -> Callable[[str], str | None]:
    """Name as Hugging Face has it -> name in a file of this architecture, None where it has none."""
    table = TensorNameMap(next(a for a, word in MODEL_ARCH_NAMES.items() if word == name), layers)
    return lambda theirs: table.get_name(theirs, (".weight", ".bias"))


# ---- writing -----------------------------------------------------------------------------------------------------------------


def _write(model: Model, path: Path, planned: Planned, weights: Sequence[Weight], tokens: Mapping[str, Any]) -> None:
    writer = GGUFWriter(path, planned.architecture)
    for key, value in {**general(weights), **planned.metadata, **tokens}.items():
        writer.add_key_value(key, value, VALUES[type(value)])
    settings = {name: tensor.numpy() for name, tensor in planned.consumed.items()}
    for name, values in settings.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    for weight in weights:
        shape = (*weight.shape[:-1], weight.row_bytes)
        writer.add_tensor_info(weight.name, shape, np.dtype(np.uint8), int(np.prod(shape)), weight.kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in settings.values():
            writer.write_tensor_data(values)
        for weight in weights:
            writer.write_tensor_data(encoded(model, weight, planned))
    finally:
        writer.close()


def encoded(model: Model, weight: Weight, planned: Planned) -> np.ndarray:
    """A tensor as it lies in the file, uint8."""
    kind, module = ARCHITECTURES[planned.architecture], weight.entry.theirs[0].split(".")[-2]
    turned = rope_rows(planned.key(HEADS[module])).backward if kind.permuted and module in HEADS else list
    if weight.storage is not None:
        held = stored_module(model, weight.entry.ours[0])
        rows = packed_bytes(weight.storage, held.canonical(), weight.kind, held.inputs)
        return turned([torch.from_numpy(rows)])[0].contiguous().numpy()
    owner, _, leaf = weight.entry.ours[0].rpartition(".")
    values = turned(weight.entry.op.backward([getattr(model.get_submodule(owner), leaf).detach()]))[0]
    shifted = kind.norm_offset and leaf == "weight" and module.endswith("norm")
    return plain_bytes(values.float() + kind.norm_offset if shifted else values, weight.kind)


def general(weights: Sequence[Weight]) -> dict[str, Any]:
    """Keys that every file has: the version of the blocks' layouts, and a number that stands for the most frequent ones."""
    sizes: Counter[str] = Counter()
    for weight in weights:
        sizes[weight.kind.name] += int(np.prod(weight.shape))
    usual = sizes.most_common(1)[0][0]
    return {"general.quantization_version": 2, "general.file_type": int(LlamaFileType[FILE_TYPES.get(usual, f"MOSTLY_{usual}")])}


def tokenizer_keys(model: Model) -> dict[str, Any]:
    """The ``tokenizer.*`` keys: those of the GGUF file that the model came from, or made of its tokenizer. Warns where there are none."""
    if model.source is None:
        return {}
    origin: Checkpoint = model.source.checkpoint
    while isinstance(origin, Wrapped):
        origin = origin.inner
    if isinstance(origin, GGUFCheckpoint):
        return {key: value for key, value in origin.metadata.items() if key.startswith("tokenizer.") and value != []}
    try:
        return to_gguf(model.source.tokenizer)
    except NoTokenizer:
        return {}
    except CheckpointError as e:
        warnings.warn(f"the file is written without a tokenizer, which llama.cpp needs: {e}", stacklevel=4)
        return {}
