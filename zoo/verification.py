"""The check of a saved model: its folder is read back and compared with the model in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from zoo.checkpoint import Checkpoint, read_header
from zoo.components.contracts import Linear, StoredLinear
from zoo.components.spec import diff
from zoo.engines import sharing
from zoo.family import family_for
from zoo.loading import available_bytes, load, weight_bytes
from zoo.model import Model
from zoo.weights import folded, linears

SIZE = 0.05  # share by which the tensors in the files may differ from what the spec's take
PER_MODULE = 2048  # bytes that formats keep beside a packed weight: shapes, tables, settings
PROMPT = 24  # tokens compared: enough rows for the products of many, the last of them alone for the products of few
ELSEWHERE = ("matmul", "scale_dtype")  # of a storage: not in the files; compared where the tensors are
LEVEL = ("scale", "zero", "absmax", "g_idx")  # tensors so called may well be the same throughout
GLOBAL = ("divisor", "multiplier", "input_divisor", "input_multiplier", "input_scale")  # scales of a whole module, beside its groups'
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


class VerificationError(ValueError):
    """A saved model that is not the one in memory, or is not fit to be used; lists every fault."""


@dataclass(frozen=True)
class Verified:
    """What was found. tensors: in memory. bytes: of the weight files. logit_difference: the largest, as a share of the largest logit."""

    tensors: int
    bytes: int
    expected_bytes: int
    logit_difference: float


@torch.no_grad()
def verify(model: Model, folder: str | Path, *, seed: int = 0) -> Verified:
    """Load a saved model from ``folder`` and compare storages, names, sizes, every tensor and the outputs for random inputs.

    Every tensor in the files is looked at: NaN, infinity, and matrices of one value (packed words that were never written) are faults,
    and so are weights that engines fuse under different global scales, unless the model's own checkpoint had them.

    Raises VerificationError listing all faults; CheckpointError where the folder does not load.
    """
    folder = Path(folder)
    expected = weight_bytes(model.spec, model.dtype)
    roomy = model.placement is None and expected < available_bytes(model.device)
    saved = load(folder, dtype=model.dtype, device=model.device if roomy else "cpu")
    assert saved.source is not None
    files = [p for p in saved.source.checkpoint.files if p.suffix == ".safetensors"]
    difference = logit_difference(model, saved, seed)
    same = with_zeros(model, saved)
    problems = [*_storages(model, saved, same), *_tensors(model, saved, same), *scan(model, files), *scales_apart(model),
                *_files(folder, files), *_sizes(model, files, expected), *_multi_token(saved)]  # fmt: skip
    if not difference <= 64 * torch.finfo(model.dtype).eps:
        problems.append(f"the logits differ by {difference:.2e} of the largest")
    if problems:
        raise VerificationError(f"{folder} is not the model in memory, or is not fit to be used:\n  " + "\n  ".join(problems))
    return Verified(len(saved.state_dict()), sum(p.stat().st_size for p in files), expected, difference)


def logit_difference(a: Model, b: Model, seed: int) -> float:
    """The largest difference of two models' outputs on random inputs, of many tokens and of one, over the largest output."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [a.spec.embed.draw(tokens, generator) for tokens in (PROMPT, 1)]
    pairs = [(a(x.to(a.device)).float(), b(x.to(b.device)).float().to(a.device)) for x in inputs]
    return max(float((x - y).abs().max() / x.abs().max()) for x, y in pairs)


# ---- against the model in memory -------------------------------------------------------------------------------------------------


def _storages(model: Model, saved: Model, same: Collection[str]) -> Iterator[str]:
    """same: paths of modules that are let be."""
    theirs = dict(linears(saved.spec))
    for path, child in linears(model.spec):
        for place, ours, other in diff(child.spec, theirs[path].spec) if path not in same else ():
            if place not in ELSEWHERE:
                yield f"{path}.{place}: {ours} in memory, {other} in the folder"


def with_zeros(model: Model, saved: Model) -> set[str]:
    """Modules without zero points that the format wrote with some, as AWQ's does, and whose weights are the same to the bit."""
    theirs = dict(linears(saved.spec))
    differing = {path: {row[0] for row in diff(child.spec, theirs[path].spec)} for path, child in linears(model.spec)}
    wider = [path for path, places in differing.items() if places - set(ELSEWHERE) == {"symmetric"}]
    return {path for path in wider if torch.equal(dense(model, path).to(saved.device), dense(saved, path))}


def dense(model: Model, path: str) -> Tensor:
    """The weight of a linear module, [outputs, inputs] float32."""
    module: Any = model.get_submodule(path)
    return module.dense_weight(torch.float32)


def _tensors(model: Model, saved: Model, same: Collection[str]) -> Iterator[str]:
    """same: paths of modules that are let be."""
    ours, theirs = ({n: t for n, t in m.state_dict().items() if n.rpartition(".")[0] not in same} for m in (model, saved))
    yield from (
        f"{name}: only in {place}"
        for place, names in (("memory", ours.keys() - theirs), ("the folder", theirs.keys() - ours))
        for name in names
    )
    for name in ours.keys() & theirs.keys():
        held = model.placement.weights[name] if ours[name].is_meta else ours[name]
        yield from (f"{name}: {reason}" for reason in _differences(held, theirs[name]))


def _differences(ours: Tensor, theirs: Tensor) -> Iterator[str]:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        yield f"{list(ours.shape)} {ours.dtype} in memory, {list(theirs.shape)} {theirs.dtype} in the folder"
    elif not torch.equal(ours.to(theirs.device), theirs):
        yield "the values differ"


def scales_apart(model: Model) -> Iterator[str]:
    """Modules that engines fuse into one, which has one global scale, but that have several; those that were loaded so are let be."""
    storages = dict(linears(model.spec))
    ours = (name.rpartition(".") for entry in (model.source.table if model.source else ()) for name in entry.ours)
    read = {path for path, _, leaf in ours if leaf not in ("weight", "bias")}
    for group in sharing(storages):
        alike = [path for path in group if path not in read and storages[path].spec == storages[group[0]].spec]
        for name in _global_scales(model, alike[0]) if len(alike) > 1 else ():
            values = {path: _global_scales(model, path)[name] for path in alike}
            if len(set(values.values())) > 1:
                said = ", ".join(f"{path} {value:g}" for path, value in values.items())
                yield f"{name} differs among modules that engines fuse, which then take one of them for all: {said}"


def _global_scales(model: Model, path: str) -> dict[str, float]:
    module = model.get_submodule(path)
    held = module.canonical() if isinstance(module, StoredLinear) else {}
    return {name: float(held[name]) for name in GLOBAL if name in held and not held[name].is_meta}


# ---- the files -------------------------------------------------------------------------------------------------------------------


def scan(model: Model, files: Iterable[Path]) -> Iterator[str]:
    """Faults of every tensor in the files, one at a time; what the model's own checkpoint has too is let be."""
    origin = model.source.checkpoint if model.source else None
    for path in files:
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield from (f"{name}: {reason}" for reason in faults(name, file.get_tensor(name), origin))


def faults(name: str, tensor: Tensor, origin: Checkpoint | None) -> Iterator[str]:
    """What is wrong with a tensor as it was saved. origin: the checkpoint that the model came from."""
    if (tensor.is_floating_point() or tensor.dtype in EIGHT) and not _wide(tensor).isfinite().all() and not _inherited(name, origin, _odd):
        yield "holds NaN or infinity"
    if tensor.dim() < 2 or not _level(tensor):
        return
    value = _wide(tensor).flatten()[0].item()
    packed = not tensor.is_floating_point()
    known_level = any(word in name.rpartition(".")[2] for word in LEVEL) and value != 0
    if not known_level and (packed or origin is not None) and not _inherited(name, origin, _level):
        yield f"every element is {value}"


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in EIGHT else tensor


def _odd(tensor: Tensor) -> bool:
    return not bool(_wide(tensor).isfinite().all())


def _level(tensor: Tensor) -> bool:
    """Whether several elements are all the same."""
    wide = _wide(tensor).flatten()
    return len(wide) > 1 and bool((wide == wide[0]).all())


def _inherited(name: str, origin: Checkpoint | None, fault: Callable[[Tensor], bool]) -> bool:
    """Whether the tensor that a saved one was made of, its module's weight for a packed one, has the fault too."""
    if origin is None:
        return False
    names = (name, f"{name.rpartition('.')[0]}.weight")
    return any(fault(origin.read(n)) for n in names if n in origin.tensors())


def _files(folder: Path, files: Iterable[Path]) -> Iterator[str]:
    """Weight files that are no shards of the model, and an index that does not say what the shards hold."""
    read = {p.name for p in files}
    yield from (f"{p.name}: no shard of the model" for p in sorted(folder.glob("*.safetensors")) if p.name not in read)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    said = json.loads(index.read_text(encoding="utf-8"))
    held = {name: p.name for p in files for name in read_header(p, str(folder))}
    wrong = sorted(n for n in said["weight_map"].keys() | held.keys() if said["weight_map"].get(n) != held.get(n))
    if wrong:
        yield f"{index.name} does not say where {folded(wrong)} lies"
    total = sum(map(payload, files))
    if said.get("metadata", {}).get("total_size") != total:
        yield f"{index.name} speaks of {said.get('metadata', {}).get('total_size')} bytes, the shards hold {total}"


def _sizes(model: Model, files: Iterable[Path], expected: int) -> Iterator[str]:
    """expected: bytes of the spec's tensors."""
    packed = sum(child.spec.name != "dense" for _, child in linears(model.spec) if isinstance(child.spec, Linear))
    size = sum(map(payload, files))
    if abs(size - expected) > SIZE * expected + PER_MODULE * packed:
        bits = 8 / max(1, sum(math.prod(info.shape) for p in files for info in read_header(p, p.name).values()))
        yield (f"the tensors in the files take {size:,} bytes, the model's {expected:,}, more than {SIZE:.0%} apart "
               f"({bits * size:.2f} bits for each stored number)")  # fmt: skip


def payload(path: Path) -> int:
    """Bytes of a .safetensors file without its header."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def _multi_token(saved: Model) -> Iterator[str]:
    """Layers that predict more tokens ahead, told of in config.json, of which the files hold nothing: engines fail to load them."""
    assert saved.source is not None
    checkpoint = saved.source.checkpoint
    stored = family_for(saved.config, checkpoint.reference).multi_token(saved.config)
    names: Mapping[str, str] = {} if stored is None else stored.names[0]
    missing = [f"{name}.weight" for name in names.values() if f"{name}.weight" not in checkpoint.tensors()]
    if missing:
        yield f"config.json tells of layers that predict more tokens ahead, but there is no {folded(missing)}"
