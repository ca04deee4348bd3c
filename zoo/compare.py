"""Where two models part: the outputs of modules that hold the same weights, in the order in which they are computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.checkpoint import CheckpointError, SafetensorsFolder, open_checkpoint
from zoo.components.embed.segments import Segments
from zoo.components.embed.tokens import Tokens
from zoo.family import family_for
from zoo.loading import load
from zoo.model import Model
from zoo.saving import family_of
from zoo.weights import SAME, Entry, entries

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Compared:
    """A module of each model and how far their outputs lie apart: largest difference over the largest value."""

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

    theirs: a model whose modules have the names of a checkpoint's tensors, in any spelling that the family reads, called as
    ``theirs(ids)``. Modules are paired through the family's weight table: linears and norms one by one, and whatever holds the
    same tensors (a layer, its attention, its MLP).
    Raises ValueError where no module of the table is in ``theirs``.
    """
    names = pairs(ours)
    modules = dict(theirs.named_modules())
    places = spellings(ours, modules)
    names = {mine: places[other] for mine, other in names.items() if other in places}
    if not names:
        raise ValueError(f"the other model has none of the modules of {ours.spec.checkpoint}; its modules begin {list(modules)[1:4]}")
    with recorded(ours, names) as mine:
        ours(ids)
    with recorded(theirs, set(names.values())) as other:
        theirs(ids)
    shapes = {path: mine[path].squeeze().shape for path in mine}
    both = [(path, names[path]) for path in mine if names[path] in other and shapes[path] == other[names[path]].squeeze().shape]
    return [Compared(a, b, relative_error(mine[a], other[b])) for a, b in both]


def against_transformers(reference: str | Path, tokens: int = 64, edits: Sequence[str] = ()) -> list[Compared]:
    """``differences`` from transformers' model of the same folder or hub id, on random tokens of one row; both in float32.

    edits: overrides of our spec. Raises CheckpointError for a file that transformers does not read as it is, and for models of images.
    """
    import transformers

    checkpoint = open_checkpoint(reference)
    if not isinstance(checkpoint, SafetensorsFolder):
        raise CheckpointError(f"{reference}: transformers is given a folder with config.json; write one with zoo.save first")
    ours = load(reference, dtype="float32", override=edits)
    ids = random_ids(ours, tokens)
    named = (ours.config.get("architectures") or [""])[0]  # a name of code beside the files is none of transformers'
    kind = getattr(transformers, named, None) or getattr(transformers, family_of(ours.spec).loader(ours.spec))
    theirs = kind.from_pretrained(checkpoint.folder, dtype=torch.float32, attn_implementation="eager").eval()
    return differences(ours, theirs, ids)


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


def pairs(model: Model) -> dict[str, str]:
    """Our module -> theirs, for every two that hold the same tensors in the same layout or are above all that do."""
    table = entries(model.spec, family_of(model.spec).rules(model.spec)) if model.source is None else model.source.table
    alone = [(e.ours[0], e.theirs[0]) for e in table if e.op is SAME and len(e.ours) == len(e.theirs) == 1]
    whole = [(a, b) for a, b in alone if a.endswith((".weight", ".bias")) and not a.startswith("embed.position.")]  # ours adds it
    leaves = {_module(a): _module(b) for a, b in whole}
    holders = {content: name for name, content in reversed(_holders(table, "theirs").items())}  # the uppermost of several
    changed = {_module(name) for e in table for name in e.ours} - leaves.keys()  # they may say the same in another order
    above = {path: content for path, content in _holders(table, "ours").items() if path not in leaves and path not in changed}
    return leaves | {path: holders[content] for path, content in above.items() if content in holders}


def _holders(table: list[Entry], side: str) -> dict[str, frozenset[int]]:
    """Every module above a tensor of the table -> the entries whose tensors are all below it, outermost modules first."""
    below: dict[str, set[int]] = defaultdict(set)
    for number, entry in enumerate(table):
        for name in getattr(entry, side):
            parts = name.split(".")[:-1]
            for depth in range(1, len(parts) + 1):
                below[".".join(parts[:depth])].add(number)
    return {name: frozenset(below[name]) for name in sorted(below, key=lambda name: name.count("."))}


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


@contextmanager
def recorded(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """The first tensor that every named module gives in its first call, by name, in the order in which the modules were done."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            several = tuple(output.values()) if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
            first = next((part for part in several if isinstance(part, Tensor)), None)
            if first is not None:
                found.setdefault(name, first.detach().clone())  # the caller may add to it in place

        return keep

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value, 0 where nothing differs; shapes may differ by singleton dimensions."""
    a, b = ours.double().flatten(), theirs.to(ours.device).double().flatten()
    if torch.equal(a, b):  # of zeros and of no values at all as well
        return 0.0
    return float((a - b).abs().max() / b.abs().max())
