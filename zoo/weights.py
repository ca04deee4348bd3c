"""One reversible table from tensor names on disk to ours, and the streaming that fills a model from it.

A family lists rules; from them and the spec comes one entry per tensor group. Loading runs the entries forward, saving runs them
backward. Each tensor is read, cast and placed before the next one is read, so memory peaks at the model plus one group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.checkpoint import Checkpoint, CheckpointError
from zoo.components.contracts import Linear, Prepared
from zoo.components.spec import Child, Spec, TensorInfo
from zoo.formats import Format
from zoo.model import Model, ModelSpec

Tensors = list[Tensor]
NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")  # of a layer or an expert, in a name
ALIGNMENT = 64  # bytes, of what torch allocates on the CPU
LONGEST = 120  # characters of a name in a message
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Op:
    """A reversible change of layout between the tensors of an entry on disk and in the model."""

    forward: Callable[[Tensors], Tensors]
    backward: Callable[[Tensors], Tensors]


SAME = Op(list, list)


@dataclass(frozen=True)
class Rule:
    """theirs (names on disk) <-> ours (names in the model); ``{l}`` runs over the layers, ``{e}`` over the experts of a layer.

    ``{e}`` on both sides makes an entry for each expert. On our side alone, the tensors of all experts are one entry: every expert's
    for the first of ``ours``, then every expert's for the second, and so on. The operations are in zoo.layouts. layers: those that the
    rule is about, where layers of one model are named in different ways; None for all. rows: the change in files whose weights are
    packed and lie together all the same, which have [..., outputs, *a row's codes]; None where there are none such.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    op: Op = SAME
    layers: frozenset[int] | None = None
    rows: Op | None = None

    @classmethod
    def same(cls, theirs: str, ours: str) -> Rule:
        return cls((theirs,), (ours,))


@dataclass(frozen=True)
class Entry:
    """One rule for one layer: the tensors that are read and written together."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    op: Op = SAME
    rows: Op | None = None


def entries(spec: ModelSpec, rules: Iterable[Rule], format: Format | None = None) -> list[Entry]:
    """The rules written out for a spec: only tensors that it has, packed linear modules in the layout of ``format``.

    Tensors that no rule names, those of parts that the family does not know, keep the names that they have in the model.
    """
    plain = written_out(spec, rules)
    have = spec.tensors()
    tie = spec.head.tie()
    if tie:
        have.pop(f"head.{tie[0]}", None)
    packed = {path: child for path, child in linears(spec) if child.spec.name != "dense"}
    if format is not None and format.together:
        found = _stacked_entries(plain, packed, format)
    else:
        if format is not None:
            check_accepted(packed, format)
        names = {path: path for path in packed} | linear_names(plain)
        found = [_packed_entry(path, child, names, format) for path, child in packed.items()]
        # a packed module leaves the tensor that it shared with others, and so must they
        plain = [e for e in plain if len(e.ours) == 1 or not any(n.rpartition(".")[0] in packed for n in e.ours)]
    inside = {n for e in found for n in e.ours}
    ruled = {n for e in plain for n in e.ours} | inside
    own = [Entry((n,), (n,)) for n in have if n not in ruled]
    return [e for e in plain + own if e.ours[0] in have and e.ours[0] not in inside] + found


def check_accepted(packed: Mapping[str, Child], format: Format) -> None:
    """Raise CheckpointError for packed modules that a format cannot hold, as where an override names another storage than the files'."""
    refused: dict[str, list[str]] = {}
    for path, child in packed.items():
        assert isinstance(child.spec, Linear)
        for reason in format.accepts(child.spec):
            refused.setdefault(reason, []).append(path)
    if refused:
        why = "; ".join(f"{folded(paths)}: {reason}" for reason, paths in refused.items())
        raise CheckpointError(f"{why}; leave the storage as the files have it, or load with quantized='dequantize' and quantize anew")


def written_out(spec: ModelSpec, rules: Iterable[Rule]) -> list[Entry]:
    """Every rule for every layer and expert, whether or not the spec has the tensors."""
    counts = [len(getattr(layer.mlp, "experts", ())) for layer in spec.layers]
    return [e for r in rules for l in _layers(r, len(counts)) for e in _for_layer(r, l, counts[l])]


def _layers(rule: Rule, count: int) -> Iterable[int]:
    if "{l}" not in rule.ours[0]:
        return [0]
    return range(count) if rule.layers is None else sorted(rule.layers)


def _for_layer(rule: Rule, l: int, experts: int) -> Iterator[Entry]:
    if "{e}" not in rule.ours[0]:
        yield Entry(_named(rule.theirs, l), _named(rule.ours, l), rule.op, rule.rows)
    elif any("{e}" in name for name in rule.theirs):
        yield from (Entry(_named(rule.theirs, l, e), _named(rule.ours, l, e), rule.op, rule.rows) for e in range(experts))
    elif experts:
        ours = tuple(name.format(l=l, e=e) for name in rule.ours for e in range(experts))
        yield Entry(_named(rule.theirs, l), ours, rule.op, rule.rows)


def _named(names: Sequence[str], l: int, e: int = 0) -> tuple[str, ...]:
    return tuple(name.format(l=l, e=e) for name in names)


def linears(spec: Spec, *at: object, path: str = "") -> Iterator[tuple[str, Child]]:
    """Every linear part of a spec under its module path, with the sizes that it is built with."""
    for name, child in spec.children(*at).items():
        here = f"{path}.{name}".strip(".")
        if isinstance(child.spec, Linear):
            yield here, child
        else:
            yield from linears(child.spec, *child.at, path=here)


def linear_names(table: Iterable[Entry]) -> dict[str, str]:
    """Our module path -> its name on disk, for every entry that is one weight to one weight."""
    pairs = ((e.ours[0], e.theirs[0]) for e in table if len(e.ours) == len(e.theirs) == 1)
    return {o.removesuffix(".weight"): t.removesuffix(".weight") for o, t in pairs if o.endswith(".weight") and t.endswith(".weight")}


def stacked_names(table: Iterable[Entry]) -> dict[str, str]:
    """Our module path -> the name on disk of the tensor that has its weight together with others', also where they are packed."""
    return {n.removesuffix(".weight"): e.theirs[0] for e in table if e.rows is not None for n in e.ours if n.endswith(".weight")}


def not_together(table: Iterable[Entry], packed: AbstractSet[str]) -> Iterator[str]:
    """What keeps packed modules of a model out of files that hold only weights which lie together; nothing where they can."""
    stacked = stacked_names(table)
    single = sorted(packed - stacked.keys())
    if single:
        yield (f"it holds weights that lie together in one tensor, as the experts of gpt-oss, but each of {folded(single)} lies in "
               "its own; keep these plain")  # fmt: skip
    shared = {stacked[path] for path in packed & stacked.keys()}
    mixed = [path for path, name in stacked.items() if name in shared and path not in packed]
    if mixed:
        yield f"{folded(mixed)} lie in one tensor with packed ones; pack these too, or keep the others plain"


def _packed_entry(path: str, child: Child, names: dict[str, str], format: Format | None) -> Entry:
    storage = child.spec
    assert isinstance(storage, Linear)
    if format is None:
        raise CheckpointError(f"{path} is stored as {storage.name}, which needs a quantized checkpoint format")
    inputs, outputs, bias = child.at
    theirs = format.disk_names(storage, bool(bias))
    ours = list(storage.tensors(*child.at))

    def decode(tensors: Tensors) -> Tensors:
        found = format.decode(storage, dict(zip(theirs, tensors, strict=True)), inputs, outputs)
        return [found[n] for n in ours]

    def encode(tensors: Tensors) -> Tensors:
        found = format.encode(storage, dict(zip(ours, tensors, strict=True)), inputs, outputs)
        return [found[n] for n in theirs]

    return Entry(tuple(f"{names[path]}.{n}" for n in theirs), tuple(f"{path}.{n}" for n in ours), Op(decode, encode))


def _stacked_entries(plain: Sequence[Entry], packed: Mapping[str, Child], format: Format) -> list[Entry]:
    """Those of tensors that hold the weights of several packed modules. Raises CheckpointError for packed modules that lie elsewhere."""
    if wrong := list(not_together(plain, packed.keys())):
        raise CheckpointError(f"{format.name} files cannot hold this model: {'; '.join(wrong)}")
    check_accepted(packed, format)
    return [_stacked_entry(e, e.rows, packed, format) for e in plain if e.rows and packed.keys() & stacked_names([e]).keys()]


def _stacked_entry(entry: Entry, rows: Op, packed: Mapping[str, Child], format: Format) -> Entry:
    """Each of the format's tensors holds the rows of all modules; their biases lie elsewhere."""
    paths = list(stacked_names([entry]))
    held = [_stored(packed[path]) for path in paths]
    name, theirs = entry.theirs[0].rpartition(".")[2], format.disk_names(held[0][0], False)
    ours = list(held[0][0].tensors(*held[0][1:], False))

    def decode(tensors: Tensors) -> Tensors:
        parts = list(zip(*(rows.forward([t]) for t in tensors), strict=True))
        if len(parts) != len(held):
            raise ValueError(f"{name} holds {len(parts)} weights, the model has {len(held)} there")
        try:
            found = [format.decode(at[0], dict(zip(theirs, part, strict=True)), *at[1:]) for at, part in zip(held, parts, strict=True)]
        except ValueError as e:  # which speaks of one weight
            raise ValueError(f"{name}: {e}") from None
        return [tensors[n] for tensors in found for n in ours]

    def encode(tensors: Tensors) -> Tensors:
        parts = [dict(zip(ours, tensors[i : i + len(ours)], strict=True)) for i in range(0, len(tensors), len(ours))]
        found = [format.encode(at[0], part, *at[1:]) for at, part in zip(held, parts, strict=True)]
        return [rows.backward([tensors[n] for tensors in found])[0] for n in theirs]

    names = tuple(f"{path}.{n}" for path in paths for n in ours)
    return Entry(tuple(f"{entry.theirs[0]}{format.joint}{n}" for n in theirs), names, Op(decode, encode))


def _stored(child: Child) -> tuple[Linear, int, int]:
    """The storage of a linear part, its inputs and outputs."""
    storage, (inputs, outputs, _) = child.spec, child.at
    assert isinstance(storage, Linear)
    return storage, inputs, outputs


# ---- filling a model ---------------------------------------------------------------------------------------------------------


def below(prefix: str, name: str) -> bool:
    """Whether a module or tensor is at or below a module; "" is the whole model."""
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def check_names(spec: ModelSpec, table: Sequence[Entry], checkpoint: Checkpoint, ignore: Callable[[str], bool]) -> None:
    """Raise CheckpointError, listing every name, if the checkpoint lacks tensors, holds others than the table reads, or of other shapes.

    A tied head that is in the file all the same must equal the embedding, else the flag is wrong and the file says more.
    """
    wanted = {n for e in table for n in e.theirs}
    there, have = checkpoint.tensors(), spec.tensors()
    missing = sorted(wanted - there.keys())
    extra = sorted(n for n in there.keys() - wanted if not ignore(n))
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {folded(missing)}")
    if extra:
        problems.append(f"{len(extra)} unexpected: {folded(extra)}")
    same = [(e.theirs[0], e.ours[0]) for e in table if e.op is SAME and e.theirs[0] in there and e.ours[0] in have]
    shapes = [(theirs, list(there[theirs].shape), list(have[ours].shape)) for theirs, ours in same]
    wrong = [f"{name} is {given}, the model has {wanted}" for name, given, wanted in shapes if given != wanted]
    if wrong:
        problems.append(f"{len(wrong)} of another shape: {', '.join(wrong)}")
    if problems:
        raise CheckpointError(f"{checkpoint.reference}: the tensors do not fit the model; " + "; ".join(problems))


def folded(names: Iterable[str]) -> str:
    """Names in one line, those that differ in one number together: ``layers.{0..31}.norm.weight``, ``experts.{0,3}.gate``."""
    found = [tuple(NUMBER.split(name)) for name in dict.fromkeys(names)]
    for place in range(1, max(map(len, found), default=0), 2):  # the numbers; text stands between them
        found = _folded_at(found, place)
    return ", ".join(name if len(name) <= LONGEST else f"{name[:LONGEST]}... ({len(name)} characters)" for name in map("".join, found))


def _folded_at(names: Iterable[tuple[str, ...]], place: int) -> list[tuple[str, ...]]:
    """The names with those that differ in the number at one place alone as one."""
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for name in names:
        groups.setdefault((name[:place], name[place + 1 :]), []).extend(name[place : place + 1])
    return [(*head, _runs(map(int, numbers)), *tail) if numbers else head for (head, tail), numbers in groups.items()]


def _runs(numbers: Iterable[int]) -> str:
    """``3``, or ``{0..2,5}`` for several numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}..{b}" for a, b in runs)
    return text if len(runs) == 1 and runs[0][0] == runs[0][1] else f"{{{text}}}"


def fill(model: Model, table: Iterable[Entry], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, prefix: str = "") -> None:
    """Read the entries below ``prefix`` into a model (whose tensors there may be on the meta device), one entry at a time."""
    wanted = (entry for entry in table if any(below(prefix, n) for n in entry.ours))
    fill_module(model, model.spec.tensors(), wanted, checkpoint, dtype, device)


def fill_module(module: nn.Module, infos: Mapping[str, TensorInfo], table: Iterable[Entry], checkpoint: Checkpoint, dtype: torch.dtype,
                device: torch.device) -> None:  # fmt: skip
    """Read all entries into a module whose spec says that it holds ``infos``. Raises CheckpointError for a tensor that does not fit."""
    kinds = {n: getattr(torch, t.dtype) for n, t in infos.items() if t.dtype}
    for entry in table:
        where = f"{checkpoint.reference}: {', '.join(entry.theirs)}"
        read = [checkpoint.read(n) for n in entry.theirs]
        tensors = zip(entry.ours, changed(entry, read, where), strict=True)
        kept = [place(module, n, t, kinds.get(n, dtype), device, where, keep=checkpoint.private) for n, t in tensors]
        if not any(kept):
            for name in entry.theirs:
                checkpoint.release(name)


def changed(entry: Entry, tensors: Tensors, where: str) -> Tensors:
    """An entry's tensors in the model's layout. Raises CheckpointError, with their shapes, where they do not have the entry's layout."""
    try:
        found = entry.op.forward(tensors)
    except ValueError as e:  # a reason that the operation gives, which speaks of the module's tensors
        module = entry.theirs[0].rpartition(".")[0]
        raise CheckpointError(f"{where if len(entry.theirs) == 1 else where.split(entry.theirs[0])[0] + module}: {e}") from None
    except (RuntimeError, IndexError) as e:  # what torch raises for shapes that do not fit
        shapes = ", ".join(str(list(t.shape)) for t in tensors)
        raise CheckpointError(f"{where}: cannot be read as {folded(entry.ours)} from the shapes {shapes}: {e}") from None
    if len(found) != len(entry.ours):
        shapes = ", ".join(str(list(t.shape)) for t in tensors)
        raise CheckpointError(f"{where}: the shapes {shapes} hold {len(found)} tensors of the model, it has {len(entry.ours)} of them")
    return found


def place(model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device, where: str, *, keep: bool) -> bool:
    """Put one tensor into the model under its name, cast to ``dtype`` unless the slot has a dtype of its own.

    keep: the tensor itself may become the model's, which spares a copy where it is as the model holds it. Returns whether it did.
    """
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    old = module._parameters.get(leaf)
    slot = old if old is not None else module._buffers[leaf]
    assert slot is not None
    if slot.shape != tensor.shape:
        raise CheckpointError(f"{where}: shape {list(tensor.shape)}, but the model's {name} is {list(slot.shape)}")
    if slot.is_floating_point() and tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{where}: {tensor.dtype} where the model's {name} has floats; a quantized checkpoint needs quantization_config"
        )
    kind = dtype if old is not None else slot.dtype
    same = tensor.dtype == kind and tensor.device == device and tensor.is_contiguous()
    kept = keep and same and aligned(tensor) and not rearranged(model, name, tensor)
    if not kept:
        tensor = tensor.to(device=device, dtype=kind, copy=True)  # straight from the mapped file to its place
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor
    return kept


def aligned(tensor: Tensor) -> bool:
    """Whether products come out to the bit as with a tensor of torch's own: those in 32 bits sum in another order from odd addresses."""
    return tensor.itemsize < 4 or tensor.data_ptr() % ALIGNMENT == 0


def rearranged(model: nn.Module, name: str, tensor: Tensor) -> bool:
    """Whether a module that holds a tensor, or one around it, will change how it lies in memory."""
    steps = name.split(".")
    around = (model.get_submodule(".".join(steps[:i])) for i in range(len(steps)))
    return any(isinstance(module, Prepared) and module.rearranges(tensor) for module in around)


def materialize(model: Model, prefix: str) -> None:
    """Load the tensors below ``prefix`` (``layers.3``, or "" for all) of a model that was loaded with ``lazy=True``."""
    if model.source is None:
        raise CheckpointError("the model was built from a spec: there is no checkpoint to load its weights from")
    model.source.fill(model, prefix)
