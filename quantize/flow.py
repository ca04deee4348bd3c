"""What feeds what in a model, told by its parts: where a scale or a rotation of activations can be folded into weights.

Each kind of part says it here for itself (``reading``, ``writing``, ``inner_folds``); no model is named. Other packages add their
parts by ``reading.register`` and so on; parts that nobody described are left alone, with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Literal

from torch import Tensor

from zoo.components.contracts import MLP, Kernel, Projection, Wiring
from zoo.components.head.lm import LMHead
from zoo.components.kernel.sinks import Sinks
from zoo.components.kernel.softcap import SoftCap
from zoo.components.mlp.clamped import Clamped
from zoo.components.mlp.gated import Gated
from zoo.components.mlp.moe import MoE
from zoo.components.mlp.plain import Plain
from zoo.components.projection.gated_delta import GatedDelta
from zoo.components.projection.gated_linear import GatedLinear
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.projection.gqa_gated import GatedGroupedQuery
from zoo.components.projection.gqa_output_gated import OutputGatedGroupedQuery
from zoo.components.projection.grouped_latent import GroupedLatent
from zoo.components.projection.grouped_tied import GroupedTied
from zoo.components.projection.latent import Latent
from zoo.components.projection.lightning import Lightning
from zoo.components.router.expert_choice import ExpertChoice
from zoo.components.router.noisy_top_k import NoisyTopK
from zoo.components.router.top_k import TopK
from zoo.components.wiring.parallel import Parallel
from zoo.components.wiring.parallel_norms import ParallelNorms
from zoo.components.wiring.pre import Pre
from zoo.components.wiring.pre_mlp import PreMLP
from zoo.components.wiring.sandwich import Sandwich
from zoo.model import LayerSpec, ModelSpec

Source = Literal["norm", "value", "up"]


@dataclass(frozen=True)
class Ports:
    """How a part is joined to the residual stream. modules: paths of linear modules; tensors: of other matrices [.., width]."""

    modules: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    def below(self, path: str) -> Ports:
        return Ports(*(tuple(f"{path}.{n}".strip(".") for n in names) for names in (self.modules, self.tensors)))

    def __add__(self, other: Ports) -> Ports:
        return Ports(self.modules + other.modules, self.tensors + other.tensors)


@dataclass(frozen=True)
class Channeling:
    """Which outputs of the source and which inputs of the readers belong to a channel.

    Outputs come in ``groups`` runs, of which the last ``width`` are channels and the ``skip`` before them are not. Inputs come in as
    many groups, each of ``repeat`` runs over the same ``width`` channels (the query heads of a key/value head).
    """

    width: int
    groups: int = 1
    repeat: int = 1
    skip: int = 0

    def outputs(self, tensor: Tensor) -> Tensor:
        """A view of the source's outputs, along the first dim, that are channels: [groups, width, ..]."""
        return tensor.unflatten(0, (self.groups, -1))[:, self.skip :]

    def inputs(self, tensor: Tensor) -> Tensor:
        """A view of the last dim, inputs of the readers: [.., groups, repeat, width]."""
        return tensor.unflatten(-1, (self.groups, self.repeat, self.width))


@dataclass(frozen=True)
class Fold:
    """Activations whose channels can be scaled: divided where they are made, multiplied where they are read.

    source: path of the norm or linear module that makes them, ``kind`` says which. parent: path of the module whose output tells how
    well the readers are rounded. mixes: channels of a group may also be mixed with each other.
    """

    kind: Source
    source: str
    readers: Ports
    parent: str
    channels: Channeling
    mixes: bool = False

    def below(self, path: str) -> Fold:
        source, parent = (f"{path}.{n}".strip(".") for n in (self.source, self.parent))
        return Fold(self.kind, source, self.readers.below(path), parent, self.channels, self.mixes)


# ---- the branches of a layer ---------------------------------------------------------------------------------------------------


@singledispatch
def reading(spec: Any) -> Ports | None:
    """What takes the input of a projection, MLP or router; None where it is not described."""
    return None


@singledispatch
def writing(spec: Any) -> Ports | None:
    """The linear modules that make the output of a projection or MLP, each adding to it alone; None where it is not described."""
    return None


@singledispatch
def inner_folds(spec: Any) -> Iterator[Fold]:
    """Folds inside a projection or MLP."""
    return iter(())


reading.register(GroupedQuery, lambda _: Ports(("q", "k", "v")))
reading.register(GatedGroupedQuery, lambda _: Ports(("q", "k", "v", "gate")))
reading.register(OutputGatedGroupedQuery, lambda _: Ports(("q", "k", "v", "gate")))
reading.register(GroupedTied, lambda _: Ports(("q", "kv", "r")))
reading.register(GatedDelta, lambda _: Ports(("q", "k", "v", "beta", "decay", "z")))
reading.register(GatedLinear, lambda _: Ports(("q", "k", "v", "decay_down", "gate")))
reading.register(Lightning, lambda _: Ports(("q", "k", "v", "gate")))
reading.register(Gated, lambda _: Ports(("gate", "up")))
reading.register(Clamped, lambda _: Ports(("gate", "up")))
reading.register(Plain, lambda _: Ports(("up",)))
reading.register(TopK, lambda _: Ports((), ("weight",)))
reading.register(ExpertChoice, lambda _: Ports((), ("weight",)))
reading.register(NoisyTopK, lambda _: Ports((), ("weight", "noise")))


@reading.register(Latent)
@reading.register(GroupedLatent)
def _(spec: Latent | GroupedLatent) -> Ports:
    return Ports(("q_up" if spec.q_rank is None else "q_down", "kv_down"))


@reading.register
def _(spec: MoE) -> Ports | None:
    inside = {"router": reading(spec.router), **{n: reading(e) for n, e in _experts(spec).items()}}
    if any(ports is None for ports in inside.values()):
        return None
    gate = Ports((), ("shared_gate",)) if spec.shared_gate else Ports()
    return sum((ports.below(n) for n, ports in inside.items() if ports is not None), gate)


for _kind in (GroupedQuery, GroupedTied, GatedDelta, GatedLinear, Lightning, Latent, GroupedLatent):
    writing.register(_kind, lambda _: Ports(("o",)))
for _kind in (Gated, Clamped, Plain):
    writing.register(_kind, lambda _: Ports(("down",)))


@writing.register
def _(spec: MoE) -> Ports | None:
    inside = {n: writing(e) for n, e in _experts(spec).items()}
    if any(ports is None for ports in inside.values()):
        return None
    return sum((ports.below(n) for n, ports in inside.items() if ports is not None), Ports())


@inner_folds.register
def _(spec: GroupedQuery) -> Iterator[Fold]:
    if spec.clip is None:
        channels = Channeling(spec.head_dim, spec.kv_heads, spec.heads // spec.kv_heads)
        mixes = not isinstance(spec, OutputGatedGroupedQuery)  # the gate multiplies each channel
        yield Fold("value", "v", Ports(("o",)), "o", channels, mixes)


@inner_folds.register
def _(spec: Latent) -> Iterator[Fold]:
    yield from _query_latent(spec)
    yield Fold("norm", "kv_norm", Ports(("kv_up",)), "kv_up", Channeling(spec.rank))
    yield Fold("value", "kv_up", Ports(("o",)), "o", Channeling(spec.value, spec.heads, 1, spec.nope), True)


@inner_folds.register
def _(spec: GroupedLatent) -> Iterator[Fold]:
    yield from _query_latent(spec)
    for i in range(spec.latents):
        yield Fold("norm", f"kv_norm.{i}", Ports((f"kv_up.{i}",)), f"kv_up.{i}", Channeling(spec.rank))


def _query_latent(spec: Latent | GroupedLatent) -> Iterator[Fold]:
    if spec.q_rank is not None:
        yield Fold("norm", "q_norm", Ports(("q_up",)), "q_up", Channeling(spec.q_rank))


@inner_folds.register
def _(spec: Gated) -> Iterator[Fold]:
    yield Fold("up", "up", Ports(("down",)), "down", Channeling(spec.hidden))


@inner_folds.register
def _(spec: Plain) -> Iterator[Fold]:
    if spec.activation in ("relu", "identity"):  # others do not commute with a scale
        yield Fold("up", "up", Ports(("down",)), "down", Channeling(spec.hidden))


@inner_folds.register
def _(spec: MoE) -> Iterator[Fold]:
    for name, expert in _experts(spec).items():
        yield from (fold.below(name) for fold in inner_folds(expert))


def _experts(spec: MoE) -> dict[str, MLP]:
    experts = {f"experts.{i}": expert for i, expert in enumerate(spec.experts)}
    return experts | ({"shared": spec.shared} if spec.shared else {})


# ---- wirings -----------------------------------------------------------------------------------------------------------------

NORMED: Mapping[type[Wiring], Mapping[str, tuple[str, ...]]] = {
    Pre: {"mixer_norm": ("mixer",), "mlp_norm": ("mlp",)},
    PreMLP: {"mlp_norm": ("mlp",)},
    Sandwich: {"mixer_norm": ("mixer",), "mlp_norm": ("mlp",)},
    Parallel: {"mixer_norm": ("mixer", "mlp")},
    ParallelNorms: {"mixer_norm": ("mixer",), "mlp_norm": ("mlp",)},
}
"""The branches that read a norm's output and are all that reads it. In other wirings it goes on along the residual stream."""


def weighs_values(kernel: Kernel) -> bool:
    """Whether a kernel's output is a weighted sum of values, channel by channel."""
    return kernel.softmax or isinstance(kernel, (SoftCap, Sinks))


def ports(layer: LayerSpec, branch: str, of: Any) -> Ports | None:
    """``reading`` or ``writing`` (given as ``of``) of a branch, ``mixer`` or ``mlp``, by paths in the layer."""
    part, path = (layer.mixer.projection, "mixer.projection") if branch == "mixer" else (layer.mlp, "mlp")
    found = of(part)
    return None if found is None else found.below(path)


def layer_folds(layer: LayerSpec, width: int) -> tuple[list[Fold], list[str]]:
    """Every fold of a layer by paths in it, and why others that one may expect are not possible."""
    found, refused = _norm_folds(layer, width)
    inner = [fold.below("mixer.projection") for fold in inner_folds(layer.mixer.projection)]
    if not weighs_values(layer.mixer.kernel):
        refused.append(f"value: kernel {layer.mixer.kernel.name} does more with values than to weigh them")
        inner = [fold for fold in inner if fold.kind != "value"]
    elif not any(fold.kind == "value" for fold in inner):
        refused.append(f"value: projection {layer.mixer.projection.name} does more with values than to pass them on")
    ups = [fold.below("mlp") for fold in inner_folds(layer.mlp)]
    if not ups:
        refused.append(f"up: mlp {layer.mlp.name} has an activation between up and down that does not commute with a scale")
    return found + inner + ups, refused


def _norm_folds(layer: LayerSpec, width: int) -> tuple[list[Fold], list[str]]:
    normed = NORMED.get(type(layer.wiring))
    if normed is None:
        return [], [f"norm: in wiring {layer.wiring.name} no norm is read by a branch alone; what it puts out goes on along the stream"]
    if not can_scale(layer.norm):
        return [], [f"norm: norm {layer.norm.name} has no weight that a scale could be folded into"]
    found, refused = [], []
    for norm, branches in normed.items():
        readers = [ports(layer, branch, reading) for branch in branches]
        if any(r is None for r in readers):
            refused.append(f"norm: what reads {norm} is not known for {', '.join(branches)}")
        else:
            parent = branches[0] if len(branches) == 1 else ""
            found.append(Fold("norm", norm, sum((r for r in readers if r), Ports()), parent, Channeling(width)))
    return found, refused


def can_scale(norm: Any) -> bool:
    """Whether a norm's output is a stored weight times something, plus a stored bias."""
    return norm.name in ("rms", "layer", "dynamic_tanh") and getattr(norm, "affine", True)


def head_fold(spec: ModelSpec) -> Fold | None:
    """The final norm and the head's matrix, where the model has both and the head is not tied."""
    if isinstance(spec.head, LMHead) and not spec.head.tied and can_scale(spec.norm):
        return Fold("norm", "norm", Ports(("head.out",)), "head.out", Channeling(spec.width))
    return None


def folds(spec: ModelSpec) -> tuple[list[Fold], dict[str, list[str]]]:
    """Every fold of a model in order, and by reason the layers that lack one."""
    found: list[Fold] = []
    refused: dict[str, list[str]] = {}
    for i, layer in enumerate(spec.layers):
        own, reasons = layer_folds(layer, spec.width)
        found += [fold.below(f"layers.{i}") for fold in own]
        for reason in reasons:
            refused.setdefault(reason, []).append(f"layers.{i}")
    head = head_fold(spec)
    return found + ([head] if head else []), refused


def siblings(layer: LayerSpec) -> list[tuple[str, ...]]:
    """Linear modules of a layer that engines fuse into one, by paths in the layer: q, k, v; gate, up of an MLP and of each expert."""
    groups = []
    for part, path in ((layer.mixer.projection, "mixer.projection"), (layer.mlp, "mlp")):
        experts = _experts(part) if isinstance(part, MoE) else {"": part}
        groups += [ports.below(f"{path}.{name}".rstrip(".")).modules for name, one in experts.items() if (ports := _fused(one))]
    return [group for group in groups if len(group) > 1]


def _fused(part: Projection | MLP) -> Ports | None:
    found = reading(part)
    if found is None or isinstance(part, MLP):
        return found
    return Ports(tuple(name for name in found.modules if name in ("q", "k", "v", "q_down", "kv_down")))
