"""The check of a saved model: its folder is read back and compared with the model in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from zoo.checkpoint import Checkpoint, read_header
from zoo.components.contracts import Linear, StoredLinear
from zoo.components.spec import compact, diff
from zoo.engines import sharing
from zoo.family import architecture, family_for
from zoo.loading import available_bytes, load, weight_bytes
from zoo.model import Model, ModelSpec
from zoo.weights import folded, linears

SIZE = 0.05  # share by which the tensors in the files may differ from what the spec's take
PER_MODULE = 2048  # bytes that formats keep beside a packed weight: shapes, tables, settings
PROMPT = 24  # tokens compared: enough rows for the products of many, the last of them alone for the products of few
ALIKE = 64 * torch.finfo(torch.float32).eps  # by which logits may differ that one device computes of the same bits in the same way
# by bytes of an element: in another way, or on another device, where sums have another order and whatever is rounded inside them differs
UNLIKE = {2: 0.2, 4: 0.02, 8: 0.02}
COPIES = 4  # of the largest weight in float32, room for which a comparison needs: both models' outputs, and what they are made of
ELSEWHERE = ("matmul", "scale_dtype")  # of a storage: not in the files; compared where the tensors are
LEVEL = ("scale", "zero", "absmax", "g_idx")  # tensors so called may well be the same throughout
GLOBAL = ("divisor", "multiplier", "input_divisor", "input_multiplier", "input_scale")  # scales of a whole module, beside its groups'
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # whole numbers of as many bytes


class VerificationError(ValueError):
    """A saved model that is not the one in memory, or is not fit to be used; lists every fault."""


@dataclass(frozen=True)
class Verified:
    """What was found. tensors: in memory. bytes: of the weight files. logit_difference: the largest, as a share of the largest logit.

    not_finite: share (0 to 1) of the logits that are NaN or infinite in memory, because the model's own checkpoint holds such values;
    these were not compared.
    """

    tensors: int
    bytes: int
    expected_bytes: int
    logit_difference: float
    not_finite: float


@torch.no_grad()
def verify(model: Model, folder: str | Path, *, seed: int = 0) -> Verified:
    """Load a saved model from ``folder`` and compare parts, storages, names, sizes, the bits of all tensors, and outputs for random inputs.

    Every tensor in the files is looked at: NaN, infinity, and matrices of one value (packed words that were never written) are faults,
    and so are weights that engines fuse under different global scales, unless the model's own checkpoint had them.

    Raises VerificationError listing all faults (of models whose parts differ, these alone); CheckpointError where the folder does not
    load, NotEnoughMemory where there is no room for a second model.
    """
    folder = Path(folder)
    expected = weight_bytes(model.spec, model.dtype)
    saved = load(folder, dtype=model.dtype, device=place(model, expected))
    assert saved.source is not None
    files = [p for p in saved.source.checkpoint.files if p.suffix == ".safetensors"]
    _raise(folder, [*_parts(model.spec, saved.spec)])
    difference, not_finite = logit_difference(model, saved, seed)
    same = with_zeros(model, saved)
    _raise(folder, [*_storages(model, saved, same), *_tensors(model, saved, same), *scan(model, files), *scales_apart(model),
                    *_files(folder, files), *_sizes(model, files, expected), *_multi_token(saved),
                    *_logits(model, difference, tolerance(model, saved), not_finite)])  # fmt: skip
    return Verified(len(saved.state_dict()), sum(p.stat().st_size for p in files), expected, difference, not_finite)


def _raise(folder: Path, problems: Sequence[str]) -> None:
    if problems:
        raise VerificationError(f"{folder} is not the model in memory, or is not fit to be used:\n  " + "\n  ".join(problems))


def place(model: Model, weights: int) -> torch.device:
    """Where the saved model is read: the model's own device if that has room for the weights and for the work on them, else the CPU."""
    largest = max((math.prod(child.at[:2]) for _, child in linears(model.spec)), default=0)
    roomy = model.placement is None and weights + COPIES * 4 * largest < available_bytes(model.device)
    return model.device if roomy else torch.device("cpu")


# ---- outputs ---------------------------------------------------------------------------------------------------------------------


def logit_difference(a: Model, b: Model, seed: int) -> tuple[float, float]:
    """How far two models' outputs lie apart on random inputs, of many tokens and of one, and the share of a's that are not finite.

    The first is the largest difference over the largest output, where those of ``a`` are finite; NaN where one of b's there is NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = [a.spec.embed.draw(tokens, generator) for tokens in (PROMPT, 1)]
    pairs = [(a(x.to(a.device)).float(), b(x.to(b.device)).float().to(a.device)) for x in inputs]
    odd = torch.cat([~x.isfinite().flatten() for x, _ in pairs])
    return float(torch.stack([_apart(x, y) for x, y in pairs]).amax()), float(odd.float().mean())  # Python's max would drop NaN


def _apart(ours: Tensor, theirs: Tensor) -> Tensor:
    finite = ours.isfinite()
    largest = ours.where(finite, 0).abs().amax().clamp(min=torch.finfo(ours.dtype).tiny)
    return (ours - theirs).where(finite, 0).abs().amax() / largest


def tolerance(model: Model, saved: Model) -> float:
    """By how much the logits of models whose tensors are equal may differ, as a share of the largest."""
    one_place = model.placement is None and model.device == saved.device
    alike = one_place and replace(saved.spec, cache=model.spec.cache) == model.spec  # kernels and products are not stored
    return ALIKE if alike else UNLIKE[model.dtype.itemsize]


def _logits(model: Model, difference: float, allowed: float, not_finite: float) -> Iterator[str]:
    if not difference <= allowed:
        yield f"the logits differ by {difference:.2e} of the largest, where {allowed:.0e} is allowed"
    if not_finite and not _odd_source(model):
        yield (f"{not_finite:.1%} of the logits are NaN or infinite in memory, though the model's own checkpoint has finite numbers alone; "
               f"{str(model.dtype).removeprefix('torch.')} may be too small for them")  # fmt: skip


def _odd_source(model: Model) -> bool:
    """Whether the checkpoint that the model came from holds NaN or infinity."""
    entries = model.source.table if model.source else ()
    return any(_odd(model.source.checkpoint.read(name)) for entry in entries for name in entry.theirs)


# ---- against the model in memory -------------------------------------------------------------------------------------------------


def _parts(ours: ModelSpec, theirs: ModelSpec) -> Iterator[str]:
    """Where two specs differ in what folders hold: all that changes what a model computes. Storages are compared apart."""
    for where, value, other in compact(diff(_as_stored(ours), _as_stored(theirs))):
        yield f"{where}: {value} in memory, {other} in the folder"


def _as_stored(spec: ModelSpec) -> ModelSpec:
    """The spec without how it is run; scales of its cache are float32 numbers, as files have them."""
    plain = architecture(spec)
    scales: Sequence[Sequence[float]] = getattr(plain.cache, "scales", None) or ()
    if not scales:
        return plain
    rounded = tuple(tuple(torch.tensor(row, dtype=torch.float32).tolist()) for row in scales)
    return replace(plain, cache=replace(plain.cache, scales=rounded))  # pyright: ignore[reportCallIssue]


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
    return {path for path in wider if same_numbers(dense(model, path).to(saved.device), dense(saved, path))}


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether all elements are equal, NaN being equal to NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one shape and dtype hold the same bits, so that NaN is equal to itself and -0 is not 0."""
    return torch.equal(a.view(WORDS[a.itemsize]), b.view(WORDS[b.itemsize]))


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
    elif not same_bits(ours.to(theirs.device), theirs):
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
