"""``zoo.save``: a model as a Hugging Face folder, under the names that its family uses."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from zoo.arguments import check_arguments
from zoo.checkpoint import CheckpointError, NoTokenizer, read_json
from zoo.components import registry
from zoo.components.cache.dense import Dense
from zoo.components.contracts import Linear, StoredLinear
from zoo.engines import PADDED, in_words, readme, refusals
from zoo.family import Family, architecture
from zoo.formats import Format
from zoo.kv_scales import declares, scheme, tensors
from zoo.loading import NotEnoughMemory
from zoo.model import Model, ModelSpec
from zoo.replacing import NEW, beside, move_in
from zoo.verification import Verified, verify
from zoo.weights import SAME, Entry, entries, folded, linear_names, linears, not_together, stacked_names, written_out

SHARD = 5_000_000_000  # bytes
GGUF = "gguf"
# in which quantized weights are written: what a family itself is published in, then the most widely read first
FORMATS = ("mxfp4", "compressed_tensors", "bitsandbytes", "aqlm", "native")
NAMED = 8  # of a folder's entries, in a message


@dataclass(frozen=True)
class Saved:
    """What was written. folder: the file, for GGUF. transformers: None where transformers loads it, else the reason why it does not.

    verified: what the comparison with the model in memory found, None where none was made.
    """

    folder: Path
    files: list[str]
    bytes: int
    transformers: str | None = field(default=None)
    verified: Verified | None = field(default=None)


def save(model: Model, folder: str | Path, *, format: str | None = None, blocks: str | None = None, shard_bytes: int = SHARD,
         overwrite: bool = False, check: Callable[[Path], object] | None = None) -> Saved:  # fmt: skip
    """Write config.json, the weights (in shards of at most ``shard_bytes``) and the tokenizer into ``folder``.

    format: how quantized linear modules are written, None: the first of FORMATS that holds them all. A folder that holds anything is
    refused unless ``overwrite``, which replaces a checkpoint whole; any other folder is refused all the same. Everything is written
    beside the folder first, ``check`` is called with what was written and may raise, and only then the new folder takes the place of the
    old one; without it, quantized weights are read back and compared with the model (``check_saved``). A model that its family's
    config cannot describe (a swapped pattern, say) is written with its spec in config.json; ``zoo.load`` reads it, transformers does
    not, and the result says why.

    format="gguf" writes one file, NAME.gguf, for llama.cpp. Packed weights are written in the blocks that hold them exactly (4 bits in
    groups of 32 as q4_0 or q4_1, 8 bits as q8_0, MXFP4 as itself); blocks: what the others are rounded to (f32, bf16, f16, q8_0, q6_k,
    q5_0, q5_1, q4_k, q4_1, q4_0, mxfp4), None: the model's dtype. Embeddings and heads keep at least q6_k, vectors are float32.

    Raises FileExistsError for a folder that may not be replaced, BlockingIOError while another process writes it, ValueError for a model
    that is not loaded, an unknown format and one that cannot hold the model, all before anything is written.
    """
    check_arguments(save, {"folder": folder, "format": format, "blocks": blocks, "shard_bytes": shard_bytes, "overwrite": overwrite})
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}; a tensor that is larger has a shard of its own")
    folder = Path(folder).expanduser()
    if format == GGUF:
        return _save_file(model, folder, blocks, shard_bytes, overwrite, check)
    if blocks is not None:
        raise ValueError(f"blocks={blocks!r} is for format='gguf'; {format or 'every other'} keeps weights as they are")
    check_folder(folder, overwrite)
    check_not_read(model, folder)
    check_loaded(model)
    check_ties(model)
    family, written = family_of(model.spec), format_of(model.spec, format)
    config, reason = describe(model.spec, model.config, family, written)
    table = entries(model.spec, family.rules(model.spec), written)
    with beside(folder) as aside:
        check_folder(folder, overwrite)  # again: what a killed process had moved aside is back in its place
        scratch = aside / NEW
        scratch.mkdir()
        (scratch / "config.json").write_text(json.dumps(config | {"torch_dtype": str(model.dtype).removeprefix("torch.")}, indent=2) + "\n")
        scales = tensors(model.spec, table) if declares(model.spec, written) else ()
        write_shards(chain(disk_tensors(model, table), scales), scratch, shard_bytes)
        for shard in scratch.glob("*.safetensors"):  # which safetensors makes readable for the owner alone
            shutil.copymode(scratch / "config.json", shard)
        write_extras(model, scratch)
        if written is not None:
            (scratch / "README.md").write_text(readme(model.spec, folder.name, config["quantization_config"], reason), encoding="utf-8")
        if check is None and written is not None:
            check = partial(check_saved, model)
        checked = check(scratch) if check is not None else None
        move_in(scratch, folder)
    if model.source is not None and (left := model.source.left_out):
        warnings.warn(f"{len(left)} tensors of {model.source.reference} are no part of the model and were not written: {folded(left)}",
                      stacklevel=2)  # fmt: skip
    if found := refusals(model.spec) if written is not None and not written.own and written.method not in PADDED else []:
        warnings.warn(in_words(found), stacklevel=2)
    files = sorted(p for p in folder.iterdir() if p.is_file())
    verified = checked if isinstance(checked, Verified) else None
    return Saved(folder, [p.name for p in files], sum(p.stat().st_size for p in files), reason, verified)


def _save_file(model: Model, path: Path, blocks: str | None, shard_bytes: int, overwrite: bool,
               check: Callable[[Path], object] | None) -> Saved:  # fmt: skip
    from zoo.gguf_writing import check_file, write  # which needs the gguf library

    if shard_bytes != SHARD:
        raise ValueError("a GGUF file is written whole; leave shard_bytes out")
    check_file(path, overwrite)
    check_not_read(model, path)
    check_loaded(model)
    reason = write(model, path, family_of(model.spec), blocks, check)
    return Saved(path, [path.name], path.stat().st_size, reason)


def check_saved(model: Model, folder: Path) -> Verified | None:
    """Compare what was written with the model; see ``zoo.quantize.verify``.

    Warns (UserWarning) where memory does not hold a second one, then None: work that is done is not lost because it cannot be checked.
    """
    try:
        return verify(model, folder)
    except (NotEnoughMemory, torch.OutOfMemoryError) as e:
        warnings.warn(f"the saved weights were not compared with those in memory: {e}", stacklevel=3)
        return None


def check_loaded(model: Model) -> None:
    if model.placement is None and any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is not loaded (it has tensors on the meta device); call zoo.weights.materialize(model, '') first")


def check_ties(model: Model) -> None:
    """Raise ValueError for weights that are one tensor in memory, told by where they lie, though the spec has one for each."""
    found: dict[tuple[int, torch.dtype, torch.Size], list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if not tensor.is_meta and tensor.numel():
            found.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape), []).append(name)
    tie = model.spec.head.tie()
    tied = {f"head.{tie[0]}", f"embed.{tie[1]}"} if tie else set()
    shared = [" = ".join(names) for names in found.values() if len(names) > 1 and set(names) != tied]
    if shared:
        raise ValueError(f"{'; '.join(shared)}: one tensor in memory, which files would hold several times; tie it in the spec "
                         "(head.tied=true), or give each module its own copy")  # fmt: skip


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raise FileExistsError, naming what is there, unless a checkpoint may be written to ``folder``."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; choose another name for the folder")
    if folder.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise FileExistsError(f"{folder} is or holds the current folder, which cannot be replaced; choose another one")
    there = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())
    if not there:
        return
    some = ", ".join(there[:NAMED]) + (f" and {len(there) - NAMED} more" if len(there) > NAMED else "")
    reason = irreplaceable(folder)
    if reason:
        raise FileExistsError(f"{folder} is not empty and never replaced, because it {reason}; it holds {some}. Choose another folder")
    if not overwrite:
        raise FileExistsError(
            f"{folder} is not empty; it holds a checkpoint: {some}. Choose another folder, or have it replaced by overwrite=True "
            "(on the command line --overwrite)"
        )


def check_not_read(model: Model, target: Path) -> None:
    """Raise FileExistsError where what is written to ``target`` would take the place of files that the model is read from."""
    files = model.source.checkpoint.files if model.source else []
    wheres = [target.absolute(), target.resolve()]
    inside = [f for f in files if any(one.is_relative_to(where) for one in (f.absolute(), f.resolve()) for where in wheres)]
    if inside:
        raise FileExistsError(
            f"{target} is or holds {inside[0]}, which the model is read from, so it is never replaced; choose another one"
        )


def irreplaceable(folder: Path) -> str | None:
    """Why a folder may hold more than a checkpoint that can be written anew, None where it does not seem to."""
    if (folder / ".git").exists():
        return "is under version control"
    if not (folder / "config.json").is_file():
        return "is no checkpoint (it has no config.json)"
    try:
        known = "model_type" in read_json(folder / "config.json", str(folder))
    except CheckpointError:
        known = False
    if not known:
        return "is no checkpoint (its config.json names no model_type)"
    inner = sorted(p.name for p in folder.iterdir() if p.is_dir())
    return f"holds folders ({', '.join(inner[:NAMED])}), which may be checkpoints too" if inner else None


def family_of(spec: ModelSpec) -> Family:
    family = registry.get("family", spec.checkpoint).spec()
    assert isinstance(family, Family)
    return family


def format_of(spec: ModelSpec, name: str | None) -> Format | None:
    """The format part for a spec's packed storages, None where it has none. Raises ValueError with the format's reasons."""
    named = format_named(FORMATS[0] if name is None else name)
    storages = {path: child.spec for path, child in linears(spec) if isinstance(child.spec, Linear) and child.spec.name != "dense"}
    if not storages:
        return None
    if name is None:
        return next((f for f in map(format_named, FORMATS) if holds(f, spec)), named)
    check_format(named, storages)
    if wrong := apart(spec, named):
        raise ValueError(f"{named.name} cannot hold this model: {'; '.join(wrong)}. Or leave the format out for one that can")
    return named


def format_named(name: str) -> Format:
    format = registry.get("format", name).spec()
    assert isinstance(format, Format)
    return format


def check_format(format: Format, storages: Mapping[str, Linear]) -> None:
    """Raise ValueError, with the modules and the reasons, where a format cannot hold storages."""
    refused = [f"{path}: {reason}" for path, storage in storages.items() for reason in format.accepts(storage)]
    if refused:
        raise ValueError(f"{format.name} cannot hold this model: {'; '.join(refused)}. Leave the format out for one that can")


def apart(spec: ModelSpec, format: Format) -> list[str]:
    """What is against a model's packed weights in a format that holds those which lie together; empty for other formats."""
    packed = {path for path, child in linears(spec) if child.spec.name != "dense"}
    return list(not_together(written_out(spec, family_of(spec).rules(spec)), packed)) if format.together else []


def holds(format: Format, spec: ModelSpec) -> bool:
    """Whether one file of a format can hold all modules of a model."""
    storages = disk_storages(spec, family_of(spec), format)
    if any(format.accepts(s) for s in storages.values() if s.name != "dense") or apart(spec, format):
        return False
    try:
        format.config(storages)
    except ValueError:
        return False
    return True


def describe(spec: ModelSpec, config: Mapping[str, Any], family: Family, format: Format | None) -> tuple[dict[str, Any], str | None]:
    """config.json for a spec, and why transformers cannot run it (None where it can)."""
    kept = {k: v for k, v in config.items() if k not in ("quantization_config", "zoo_spec", "dtype", "torch_dtype")}
    reason = f"it knows no quant_method {format.method}" if format and format.own else None
    scaled = declares(spec, format)
    try:
        written = family.write(replace(spec, cache=Dense()) if scaled else spec, kept)
        if format is not None and not format.together:
            check_packed(spec, family)
    except ValueError as e:
        reason = str(e)
        written = registry.get("family", "zoo").spec().write(architecture(spec), kept)  # type: ignore[attr-defined]
    if format is None:
        return written, reason
    quantization = format.config(disk_storages(spec, family, format)) | ({"kv_cache_scheme": scheme(spec)} if scaled else {})
    return written | {"quantization_config": quantization}, reason


def check_packed(spec: ModelSpec, family: Family) -> None:
    """Raise ValueError for packed modules whose weights the family's files hold in another layout, or together with others."""
    packed = {f"{path}.weight" for path, child in linears(spec) if child.spec.name != "dense"}
    other = [n for e in written_out(spec, family.rules(spec)) if e.op is not SAME for n in e.ours if n in packed]
    if other:
        raise ValueError(f"{family.name} files hold {other[0]} turned or in one tensor with others, which packed weights cannot be"
                         + f"; so with {len(other) - 1} more" * (len(other) > 1))  # fmt: skip


def disk_storages(spec: ModelSpec, family: Family, format: Format) -> dict[str, Linear]:
    """Storage of every linear module, a tied head included, by name on disk; of several in one tensor that the format keeps, of one."""
    table = written_out(spec, family.rules(spec))
    names = linear_names(table) | (stacked_names(table) if format.together else {})
    return {names.get(path, path): child.spec for path, child in linears(spec) if isinstance(child.spec, Linear)}


def write_shards(named: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int) -> None:
    """Tensors under their names on disk, in one file or in numbered shards with an index."""
    shards: list[dict[str, str]] = []
    total, held, size = 0, {}, 0
    for name, tensor in named:
        if held and size + tensor.nbytes > shard_bytes:
            shards.append(_write_shard(held, folder, len(shards)))
            held, size = {}, 0
        held[name] = tensor.contiguous().cpu()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    shards.append(_write_shard(held, folder, len(shards)))
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        (folder / f"shard-{i}.safetensors").rename(folder / file)
    where = {name: file for shard, file in zip(shards, files, strict=True) for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(tensors: dict[str, Tensor], folder: Path, number: int) -> dict[str, str]:
    try:
        save_file(tensors, folder / f"shard-{number}.safetensors", metadata={"format": "pt"})
    except SafetensorError as e:
        raise OSError(f"{folder}: the weights cannot be written ({e}); what was there before is as it was") from None
    return dict.fromkeys(tensors, "")


def disk_tensors(model: Model, table: list[Entry]) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, tensor) for every entry, one entry at a time."""
    for entry in table:
        yield from zip(entry.theirs, entry.op.backward(stored(model, entry.ours)), strict=True)


def stored(model: Model, names: Sequence[str]) -> list[Tensor]:
    """Tensors of the model by name, packed modules in their canonical layout."""
    owners = {name: name.rpartition(".")[0] for name in names}
    held = {owner: model.get_submodule(owner) for owner in set(owners.values())}
    state = {owner: m.canonical() if isinstance(m, StoredLinear) else m for owner, m in held.items()}
    found = {name: _leaf(state[owner], name.rpartition(".")[2]).detach() for name, owner in owners.items()}
    return [model.placement.weights[name] if tensor.is_meta else tensor for name, tensor in found.items()]


def _leaf(state: Any, leaf: str) -> Tensor:
    return state[leaf] if isinstance(state, dict) else getattr(state, leaf)


def write_extras(model: Model, folder: Path) -> None:
    """Tokenizer and generation settings, where the model came with them."""
    if model.source is None:
        return
    generation = model.source.generation
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    preprocessing = model.source.preprocessing
    if preprocessing:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing, indent=2) + "\n")
    try:
        tokenizer = model.source.tokenizer
    except NoTokenizer:  # a checkpoint without one stays one
        return
    except CheckpointError as e:
        warnings.warn(f"the model is written without a tokenizer: {e}", stacklevel=3)
        return
    tokenizer.save_pretrained(folder)
