"""Prediction of several tokens ahead, over a model's last hidden states and with its own embedding and head.

They are made of whole layers, hence not heads among the parts. Shapes: B batch, T tokens, M model width, V vocabulary, D depths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from zoo.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from zoo.components.contracts import HeadModule, Linear, NoCache, Norm, Prepared, Step, attach, unfilled
from zoo.components.spec import Child, Spec, default
from zoo.dequantized import dequantized
from zoo.family import Family, family_for
from zoo.loading import parse_device, parse_dtype, read_spec
from zoo.model import Layer, LayerSpec, ModelSpec
from zoo.weights import Entry, fill_module, written_out


def ahead(ids: Tensor, step: Step, distance: int) -> tuple[Tensor, Step]:
    """Each column's token ``distance`` places later in its row [B, T], and a step in which columns that have none are padding."""
    later = step.pos.roll(-distance, 1)
    have = (step.pos >= 0) & (later == step.pos + distance)
    if step.segment is not None:
        have &= step.segment == step.segment.roll(-distance, 1)
    return ids.roll(-distance, 1), Step(torch.where(have, step.pos, -1), None, step.segment, step.axes)


@dataclass(frozen=True, kw_only=True)
class Chained(Spec):
    """DeepSeek-V3's modules, arXiv:2412.19437, section 2.2: one layer a depth, each on the states of the one before.

    Depth k maps [norm(embedding of token i + k), norm(state i of depth k - 1)] by a linear map to the input of its layer; a norm and
    the model's head follow and predict token i + k + 1. norm: of all of these. order: of the two in the linear map's columns,
    ``embedding_first`` in DeepSeek's, GLM's and Qwen's checkpoints, ``hidden_first`` in the paper's formula and MiMo's.
    """

    layers: tuple[LayerSpec, ...]
    norm: Norm = default(Norm, "rms")
    order: Literal["embedding_first", "hidden_first"] = "embedding_first"
    project: Linear = default(Linear, "dense")

    def children(self, width: int, index: int) -> dict[str, Child]:
        return {f"depths.{k}": Child(self.depth(layer), (width, index + k)) for k, layer in enumerate(self.layers)}

    def depth(self, layer: LayerSpec) -> Depth:
        return Depth(layer=layer, norm=self.norm, order=self.order, project=self.project)

    def problems(self, width: int, index: int) -> Iterator[tuple[str, str]]:
        if not self.layers:
            yield "layers", "there is at least one depth"

    def build(self, width: int, index: int) -> ChainedModule:
        return ChainedModule(self, width, index)


@dataclass(frozen=True, kw_only=True)
class Depth(Spec):
    """One module of ``Chained``."""

    layer: LayerSpec
    norm: Norm
    order: Literal["embedding_first", "hidden_first"]
    project: Linear

    def children(self, width: int, index: int) -> dict[str, Child]:
        norms = {name: Child(self.norm, (width,)) for name in ("embed_norm", "hidden_norm", "norm")}
        return {**norms, "project": Child(self.project, (2 * width, width, False)), "layer": Child(self.layer, (width, index))}

    def build(self, width: int, index: int) -> DepthModule:
        return DepthModule(self, width, index)


class DepthModule(nn.Module):
    """(states, embeddings [B, T, M] each, step) -> normed states [B, T, M]."""

    embed_norm: nn.Module
    hidden_norm: nn.Module
    norm: nn.Module
    project: nn.Module
    layer: Layer

    def __init__(self, spec: Depth, width: int, index: int):
        super().__init__()
        self.spec = spec
        attach(self, spec.children(width, index))

    def forward(self, hidden: Tensor, embedded: Tensor, step: Step) -> Tensor:
        both = [self.embed_norm(embedded), self.hidden_norm(hidden)]
        if self.spec.order == "hidden_first":
            both.reverse()
        return self.norm(self.layer(self.project(torch.cat(both, -1)), step, NoCache()))


class ChainedModule(nn.Module):
    """Built with (model width, index of the first layer): the model's number of layers."""

    def __init__(self, spec: Chained, width: int, index: int):
        super().__init__()
        self.depths = nn.ModuleList(child.build() for child in spec.children(width, index).values())

    def forward(self, hidden: Tensor, ids: Tensor, step: Step, embed: nn.Module, head: HeadModule) -> Tensor:
        """hidden [B, T, M] (``Model.hidden``), ids [B, T] -> logits [B, T, D, V].

        Column i of depth k (from 1) predicts token i + k + 1; it is meaningless where token i + k is not in the row.
        """
        logits = []
        for k, depth in enumerate(self.depths, 1):
            later, shifted = ahead(ids, step, k)
            hidden = depth(hidden, embed(later, shifted), shifted)
            logits.append(head(hidden))
        return torch.stack(logits, 2)


@dataclass(frozen=True, kw_only=True)
class Parallel(Spec):
    """Meta's heads, Gloeckle et al. 2024, arXiv:2404.19737, section 2: one layer a head, all on the trunk's states.

    Head k (from 1) is norm and the model's own head over its layer and predicts token i + k. norm: one for all heads.
    """

    layers: tuple[LayerSpec, ...]
    norm: Norm = default(Norm, "rms")

    def children(self, width: int, index: int) -> dict[str, Child]:
        layers = {f"layers.{k}": Child(layer, (width, index + k)) for k, layer in enumerate(self.layers)}
        return {**layers, "norm": Child(self.norm, (width,))}

    def problems(self, width: int, index: int) -> Iterator[tuple[str, str]]:
        if not self.layers:
            yield "layers", "there is at least one head"

    def build(self, width: int, index: int) -> ParallelModule:
        return ParallelModule(self, width, index)


class ParallelModule(nn.Module):
    """Built with (model width, index of the first layer): the trunk's number of layers."""

    norm: nn.Module

    def __init__(self, spec: Parallel, width: int, index: int):
        super().__init__()
        children = spec.children(width, index)
        attach(self, {"norm": children.pop("norm")})
        self.layers = nn.ModuleList(child.build() for child in children.values())

    def forward(self, hidden: Tensor, step: Step, head: HeadModule) -> Tensor:
        """hidden [B, T, M], the trunk's states before any final norm -> logits [B, T, D, V]."""
        return torch.stack([head(self.norm(layer(hidden, step, NoCache()))) for layer in self.layers], 2)


# ---- checkpoints ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredDepths:
    """Where a checkpoint has the modules of a Chained; the layer of depth k is the k-th after the model's last one.

    names: for each depth, our modules but the layer -> theirs. copies: tensors of the model that files repeat -> the model's own.
    """

    spec: Chained
    names: tuple[Mapping[str, str], ...]
    copies: Mapping[str, str]


def load(reference: str | Path, *, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu") -> ChainedModule:
    """The modules that a checkpoint has beside its model (``zoo.load``), whose embedding and head they are called with.

    Raises CheckpointError for a checkpoint that has none, and where tensors are missing or do not fit.
    """
    place, checkpoint = parse_device(device), dequantized(open_checkpoint(reference))
    family, config = family_for(checkpoint.config, checkpoint.reference), checkpoint.config
    model, _ = read_spec(family, config, checkpoint.reference, tensors=checkpoint.tensors())
    stored = family.multi_token(config)
    if stored is None:
        raise CheckpointError(f"{reference}: its config.json tells of no layers that predict more tokens ahead; zoo.load reads the model")
    table, width, index = depth_entries(family, model, stored, checkpoint), model.width, len(model.layers)
    check_depths(stored, table, checkpoint)
    with unfilled():
        module = stored.spec.build(width, index)
    fill_module(module, stored.spec.tensors(width, index), table, checkpoint, parse_dtype(dtype, checkpoint.dtype), place)
    for part in module.modules():
        if isinstance(part, Prepared):
            part.prepare()
    return module.eval()


def depth_entries(family: Family, model: ModelSpec, stored: StoredDepths, checkpoint: Checkpoint) -> list[Entry]:
    """The layers by the family's own table, as if the model had them too, and what is around them."""
    longer, first = replace(model, layers=model.layers + stored.spec.layers), len(model.layers)
    have, found = stored.spec.tensors(model.width, first), []
    for entry in written_out(longer, family.rules_for(longer, checkpoint.tensors())):
        start, _, rest = entry.ours[0].partition(".")
        number = int(rest.partition(".")[0]) - first if start == "layers" else -1
        ours = tuple(name.replace(f"layers.{number + first}.", f"depths.{number}.layer.", 1) for name in entry.ours)
        if number >= 0 and ours[0] in have:
            found.append(Entry(entry.theirs, ours, entry.op))
    names = [(f"depths.{k}.{ours}.weight", f"{theirs}.weight") for k, row in enumerate(stored.names) for ours, theirs in row.items()]
    return found + [Entry((theirs,), (ours,)) for ours, theirs in names]


def check_depths(stored: StoredDepths, table: list[Entry], checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for tensors that are missing, and for copies of the model's that are none."""
    there = checkpoint.tensors()
    missing = sorted({n for e in table for n in e.theirs} - there.keys())
    if missing:
        raise CheckpointError(f"{checkpoint.reference}: {len(missing)} tensors of the multi-token layers are missing: {', '.join(missing)}")
    for copy, own in stored.copies.items():
        if copy in there and not torch.equal(checkpoint.read(copy), checkpoint.read(own)):
            raise CheckpointError(f"{checkpoint.reference}: {copy} differs from {own}, which the modules are to share with the model")
