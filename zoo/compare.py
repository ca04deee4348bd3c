"""Where two models part: the outputs of modules that hold the same weights, in the order in which they are computed."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.checkpoint import CheckpointError, SafetensorsFolder, open_checkpoint
from zoo.components.contracts import StoredLinear
from zoo.components.embed.segments import Segments
from zoo.components.embed.tokens import Tokens
from zoo.family import family_for
from zoo.loading import load
from zoo.model import Model
from zoo.saving import family_of
from zoo.weights import SAME, Entry, entries

TOLERANCE = 1e-5
OUTPUT = "output"  # what the whole model is called


@dataclass(frozen=True)
class Compared:
    """A module of each model, or several side by side, and how far their outputs lie apart: largest difference over largest value."""

    ours: str
    theirs: str
    error: float

    def __str__(self) -> str:
        return f"{self.ours} ({self.theirs}): relative error {self.error:.1e}"


def first_difference(ours: Model, theirs: nn.Module, ids: Tensor, tolerance: float = TOLERANCE) -> Compared | None:
    """The first module whose output differs by more than ``tolerance``, None where none does. See ``differences``."""
    return next((row for row in differences(ours, theirs, ids) if not row.error <= tolerance), None)


@torch.no_grad()
def differences(ours: Model, theirs: nn.Module, ids: Tensor) -> list[Compared]:
    """Every pair of modules that can be compared on ``ids`` [B, T] int64, in the order in which our model is done with them.

    theirs: another model of the zoo, whose modules are paired by name (the same model quantized, converted, edited), or one whose
    modules have the names of a checkpoint's tensors, in any spelling that the family reads, called as ``theirs(ids)``. Those are paired
    through the family's weight table: linears and norms, several of ours with one of theirs and the other way round where their tensors
    are joined, and whatever holds the same tensors (a layer, its attention, its MLP).
    Raises ValueError where no module of the table is in ``theirs``.
    """
    matches = by_name(ours, theirs) if isinstance(theirs, Model) else by_table(ours, theirs)
    if not matches:
        modules = [name for name, _ in theirs.named_modules()]
        raise ValueError(f"the other model has none of the modules of {ours.spec.checkpoint}; its modules begin {modules[1:4]}")
    matches.append(Match(("",), ("",)))  # the whole models
    with recorded(ours, {name for m in matches for name in m.ours}) as mine:
        ours(ids.to(ours.device))
    device = theirs.device if isinstance(theirs, Model) else next(theirs.parameters()).device
    with recorded(theirs, {name for m in matches for name in m.theirs}) as other:
        theirs(ids.to(device))
    done = {name: place for place, name in enumerate(mine)}
    rows = [(max(done[name] for name in m.ours), m.compared(mine, other)) for m in matches if m.seen(mine, other)]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0]) if row is not None]


@dataclass(frozen=True)
class Match:
    """Modules of both models that say the same.

    order: for each feature that theirs give, laid end to end, the place of the same one among those that ours give; None for the same
    order.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    order: Tensor | None = None

    def seen(self, mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
        """Whether all of them gave a tensor."""
        return all(name in mine for name in self.ours) and all(name in other for name in self.theirs)

    def compared(self, mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Compared | None:
        """How far their outputs lie apart, None where these have other shapes."""
        a, b = ([outputs[name].squeeze() for name in names] for outputs, names in ((mine, self.ours), (other, self.theirs)))
        if len({t.shape[:-1] for t in a}) > 1 or len({t.shape[:-1] for t in b}) > 1:
            return None
        left, right = torch.cat(a, -1), torch.cat(b, -1)
        if left.numel() != right.numel():
            return None
        if self.order is not None:
            left = left.reshape(*right.shape[:-1], -1)[..., self.order.to(left.device)]
        # heads may stand before the tokens or after them
        alike = [t for t in (right, right.transpose(0, -2)) if t.shape == left.shape] if right.dim() == 3 else [right]
        errors = [relative_error(left, t) for t in alike if t.shape == left.shape]
        ours, theirs = (", ".join(name or OUTPUT for name in side) for side in (self.ours, self.theirs))
        return Compared(ours, theirs, min(errors)) if errors else None


def by_name(ours: Model, theirs: Model) -> list[Match]:
    """The modules that two models of the zoo both have. Raises ValueError for models of different vocabularies."""
    sizes = [getattr(model.spec.embed, "vocab", None) for model in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the models have vocabularies of {sizes[0]} and {sizes[1]} tokens; only models of one vocabulary are compared")
    there = dict(theirs.named_modules())
    return [Match((name,), (name,)) for name, _ in ours.named_modules() if name and name in there]


def by_table(ours: Model, theirs: nn.Module) -> list[Match]:
    """The modules that hold the same weights by the family's table, under the names that they have in ``theirs``."""
    modules = dict(theirs.named_modules())
    places = spellings(ours, modules)
    known = [m for m in matched(ours) if all(name in places for name in m.theirs)]
    found = [replace(m, theirs=tuple(places[name] for name in m.theirs)) for m in known]
    scaled = getattr(ours.spec.embed, "scale", 1.0) != 1.0  # which a plain table leaves to the model around it
    return [m for m in found if not (scaled and m.ours == ("embed",) and type(modules[m.theirs[0]]) is nn.Embedding)]


def against_transformers(reference: str | Path, tokens: int = 64, edits: Sequence[str] = ()) -> list[Compared]:
    """``differences`` from transformers' model of the same folder or hub id, on random tokens of one row; both in float32.

    edits: overrides of our spec. Raises CheckpointError for a file that transformers does not read as it is, and for models of images.
    """
    check_folder(reference)
    ours = load(reference, dtype="float32", override=edits)
    ids = random_ids(ours, tokens)
    return differences(ours, transformers_model(ours), ids)


def check_folder(reference: str | Path) -> SafetensorsFolder:
    """The checkpoint, if it is one that transformers reads. Raises CheckpointError for files of other kinds."""
    checkpoint = open_checkpoint(reference)
    if not isinstance(checkpoint, SafetensorsFolder):
        raise CheckpointError(f"{reference}: transformers is given a folder with config.json; write one with zoo.save first")
    return checkpoint


def transformers_model(ours: Model) -> nn.Module:
    """What transformers makes of the checkpoint that a model was loaded from, in the model's dtype, on the CPU."""
    import transformers

    folder = check_folder(ours.source.reference).folder
    named = (ours.config.get("architectures") or [""])[0]  # a name of code beside the files is none of transformers'
    kind = getattr(transformers, named, None) or getattr(transformers, family_of(ours.spec).loader(ours.spec))
    return kind.from_pretrained(folder, dtype=ours.dtype, attn_implementation="eager").eval()


def random_ids(model: Model, tokens: int) -> Tensor:
    """[1, tokens] int64, without the padding id, which some models of transformers take to be padding wherever it stands."""
    embed = model.spec.embed
    if not isinstance(embed, Tokens | Segments):
        raise CheckpointError(f"{model.spec.checkpoint} models have an embedding {embed.name}; only models of token ids are compared; "
                              "give differences() the pixels")  # fmt: skip
    pad = model.config.get("pad_token_id")
    ids = torch.randint(embed.vocab - (pad is not None), (1, tokens), generator=torch.Generator().manual_seed(0))
    return ids if pad is None else ids + (ids >= pad)


def spellings(ours: Model, modules: Iterable[str]) -> dict[str, str]:
    """What the weight table calls a module -> its name in another model, which is spelled as in some of the family's files."""
    source = ours.source
    if source is None or source.checkpoint.config.get("model_type", "zoo") == "zoo":
        family = family_of(ours.spec)
    else:
        family = family_for(source.checkpoint.config, source.reference)
    modules = list(modules)
    known = family.known_as([f"{name}.weight" for name in modules], ours.spec)
    return {_module(known[f"{name}.weight"]): name for name in modules} | {name: name for name in modules}


def matched(model: Model) -> list[Match]:
    """The modules, by the names that the weight table has, that hold the same tensors or are above all that do."""
    table = entries(model.spec, family_of(model.spec).rules(model.spec)) if model.source is None else model.source.table
    owners = {_module(name) for e in table for name in e.ours}
    more = {above for owner in owners for above in _above(owner)} | {"embed.position"}  # ours adds to what it is given
    leaves: dict[tuple[str, ...], Match] = {}
    for match in filter(None, (leaf_match(model, e) for e in table)):
        if not more.intersection(match.ours):
            leaves.setdefault(match.ours, match)  # a weight before its bias
    mine, taken = ({name for m in leaves.values() for name in getattr(m, side)} for side in ("ours", "theirs"))
    holders = {content: name for name, content in reversed(_holders(table, "theirs").items()) if name not in taken}  # the uppermost
    unlike = {_module(name) for e in table if e.op is not SAME for name in e.ours}  # they may say the same in another order
    hidden = mine | unlike | {"embed.position"}
    above = {path: content for path, content in _holders(table, "ours").items() if path not in hidden}
    return [*leaves.values(), *(Match((path,), (holders[content],)) for path, content in above.items() if content in holders)]


def leaf_match(model: Model, entry: Entry) -> Match | None:
    """The modules whose weights an entry holds, where each of their features is one of the other side's; None where that is not so."""
    ours, theirs = (tuple(dict.fromkeys(map(_module, names))) for names in (entry.ours, entry.theirs))
    if len(ours) == len(theirs) == 1 and isinstance(model.get_submodule(ours[0]), StoredLinear):
        return Match(ours, theirs)  # a module whose weight is packed is one in the files
    if not all(name.endswith(".weight") for name in (*entry.ours, *entry.theirs)):
        return Match(ours, theirs) if entry.op is SAME and entry.ours[0].endswith(".bias") else None
    if entry.op is SAME:
        return Match(ours, theirs) if len(ours) == len(theirs) == 1 else None
    shapes = [model.spec.tensors()[name].shape for name in entry.ours]
    order = feature_order(entry, shapes)
    return None if order is None else Match(ours, theirs, order)


def feature_order(entry: Entry, shapes: Sequence[Sequence[int]]) -> Tensor | None:
    """[features] int64: which row of our weights, laid end to end, each feature of theirs is; None where they are not alike.

    The operation shows it itself, for weights that hold nothing but the numbers of their rows. Theirs are [features], [features, inputs],
    or, as GPT-2's, [inputs, features].
    """
    if any(len(shape) > 2 for shape in shapes):
        return None
    first = accumulate((shape[0] for shape in shapes), initial=0)
    numbered = [torch.arange(at, at + shape[0], dtype=torch.int32).view(-1, *[1] * (len(shape) - 1)).expand(*shape)
                for at, shape in zip(first, shapes, strict=False)]  # fmt: skip
    found = [rows_of(weight) for weight in entry.op.backward(numbered)]
    return None if any(rows is None for rows in found) else torch.cat([rows for rows in found if rows is not None]).long()


def rows_of(weight: Tensor) -> Tensor | None:
    """The number that each row, or else each column, of a weight holds throughout; None where they hold several."""
    if weight.dim() == 1:
        return weight
    ways = (weight, weight.t()) if weight.dim() == 2 else ()
    return next((way[:, 0] for way in ways if torch.equal(way, way[:, :1].expand_as(way))), None)


def _holders(table: list[Entry], side: str) -> dict[str, frozenset[int]]:
    """Every module above a tensor of the table -> the entries whose tensors are all below it, outermost modules first."""
    below: dict[str, Counter[int]] = defaultdict(Counter)
    for number, entry in enumerate(table):
        for name in getattr(entry, side):
            for module in _above(name):
                below[module][number] += 1
    whole = {name: frozenset(n for n, count in held.items() if count == len(getattr(table[n], side))) for name, held in below.items()}
    return {name: whole[name] for name in sorted(whole, key=lambda name: name.count(".")) if whole[name]}


def _above(name: str) -> Iterator[str]:
    """The modules that a tensor or module lies in, innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


@contextmanager
def recorded(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """The first tensor that every named module gives in its first call, by name, in the order in which the modules were done."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            several = tuple(output.values()) if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
            first = next((part for part in several if isinstance(part, Tensor)), None)
            if first is not None and name not in found:
                found[name] = first.detach() - residual(module, args, kwargs)  # a copy: the caller may add to it in place

        return keep

    handles = [model.get_submodule(name).register_forward_hook(hook(name), with_kwargs=True) for name in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def residual(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | int:
    """What a module was handed to add to its output, as Bloom's and MPT's halves of a layer are; 0 for nothing."""
    signature = inspect.signature(module.forward)
    return signature.bind(*args, **kwargs).arguments.get("residual", 0) if "residual" in signature.parameters else 0


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value, 0 where nothing differs; shapes may differ by singleton dimensions."""
    a, b = ours.double().flatten(), theirs.to(ours.device).double().flatten()
    if torch.equal(a, b):  # of zeros and of no values at all as well
        return 0.0
    return float((a - b).abs().max() / b.abs().max())
