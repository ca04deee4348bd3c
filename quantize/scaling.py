"""Carries out transforms that scale channels: gathers what they ask for, and folds their scales into a layer's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.model import Model
from zoo.quantize.capture import calls, channel_sizes, second_moments
from zoo.quantize.contracts import Channels, ChannelScaling, Quantizer
from zoo.quantize.distributed import Processes
from zoo.quantize.flow import Channeling, Fold
from zoo.quantize.report import Change
from zoo.quantize.stats.channels import ChannelSizes
from zoo.quantize.stats.hessian import Hessian

Passes = Callable[[], Iterable[Callable[[], Any]]]


@dataclass(frozen=True)
class Surroundings:
    """What a transform finds in a stage. methods: the quantizers of its modules. passes: runs the stage on the data, batch by batch.

    judged: the same for the windows that tell how well a parent module's readers are rounded. device: of the stage.
    """

    model: Model
    methods: Mapping[str, Quantizer]
    passes: Passes
    judged: Passes
    processes: Processes
    device: torch.device


def scale_stage(transform: ChannelScaling, folds: Sequence[Fold], around: Surroundings) -> list[Change]:
    """Scale the channels of the folds, which are those of one stage, and say what was done to each."""
    model = around.model
    inputs = {fold.source: model.get_submodule(fold.readers.modules[0]) for fold in folds if fold.kind != "norm"}
    outputs = {fold.source: model.get_submodule(fold.source) for fold in folds if fold.kind == "norm"}
    sizes = around.processes.pooled(channel_sizes(inputs, outputs, around.passes()), ChannelSizes, around.device)
    alone = {fold.parent: model.get_submodule(fold.parent) for fold in folds if fold.parent in fold.readers.modules}
    hessians: Mapping[str, Hessian] = {}
    if transform.measured and alone:
        hessians = around.processes.pooled(second_moments(alone, around.passes()), Hessian, around.device)
    changes = []
    for fold in folds:
        done = _scale(transform, fold, around, sizes.get(fold.source), hessians)
        changes.append(Change(transform.name, fold.source, done))
    return changes


def _scale(transform: ChannelScaling, fold: Fold, around: Surroundings, sizes: ChannelSizes | None,
           hessians: Mapping[str, Hessian]) -> dict[str, Any]:  # fmt: skip
    if sizes is None or not sizes.tokens:
        return {"skipped": "no tokens"}
    found = transform.scale(_channels(fold, around, sizes, hessians))
    # the first process's for all: another kind of device may differ in the last bit
    found = around.processes.decided(lambda: found and (found[0].cpu(), found[1]))
    if found is None:
        return {"skipped": "nothing better than no scale"}
    scale, facts = found[0].to(around.device), found[1]
    if not apply_scale(around.model, fold, scale):
        return {"skipped": f"scaled weights would pass the range of {around.model.dtype}"}
    return facts | {"least": float(scale.min()), "largest": float(scale.max())}


def _channels(fold: Fold, around: Surroundings, sizes: ChannelSizes, hessians: Mapping[str, Hessian]) -> Channels:
    methods = {path: around.methods[path] for path in fold.readers.modules if path in around.methods}
    weights = {path: weight_of(around.model, path) for path in methods}
    group = min((g for m in methods.values() if (g := getattr(m.storage, "group_size", None))), default=None)
    if fold.parent in fold.readers.modules:
        error = partial(_linear_error, fold, weights[fold.parent], methods[fold.parent], hessians.get(fold.parent))
    else:
        error = _ParentError(fold, around, weights, methods)
    largest, mean = sizes.largest, sizes.mean
    if fold.kind != "norm":  # those of the readers' inputs, of which several may share a channel
        largest, mean = _runs(largest, fold.channels).amax(0), _runs(mean, fold.channels).mean(0)
    rows = [_runs(w, fold.channels).flatten(0, 1) for w in weights.values()]
    whole = group is not None and fold.channels.width % group == 0
    return Channels(rows, group if whole else None, largest, mean, error)


def _runs(tensor: Tensor, channels: Channeling) -> Tensor:
    """[.., inputs] -> [repeat, .., channels]: the runs of inputs that share the channels, one behind the other."""
    return channels.inputs(tensor).movedim(-2, 0).flatten(-2)


def spread(scale: Tensor, channels: Channeling) -> Tensor:
    """A scale of channels as one of the readers' inputs."""
    return scale.view(channels.groups, 1, channels.width).expand(-1, channels.repeat, -1).reshape(-1)


def rounded(weight: Tensor, scale: Tensor, method: Quantizer) -> Tensor:
    """The weight [outputs, inputs] as it is once scaled inputs were rounded."""
    return method.rounded(weight * scale) / scale


def _linear_error(fold: Fold, weight: Tensor, method: Quantizer, hessian: Hessian | None, scale: Tensor) -> float:
    """Mean squared output error of a linear module, from the second moments of its inputs, which transforms that are measured have."""
    assert hessian is not None
    off = weight - rounded(weight, spread(scale, fold.channels), method)
    return float(((off @ hessian.matrix) * off).sum() / len(weight))


class _ParentError:
    """Mean squared output error of the module around the readers; its inputs and outputs are taken beforehand."""

    def __init__(self, fold: Fold, around: Surroundings, weights: Mapping[str, Tensor], methods: Mapping[str, Quantizer]):
        self.fold, self.around, self.weights, self.methods = fold, around, weights, methods
        self.parent = around.model.get_submodule(fold.parent)
        self.seen = [(args, self.parent(*args).float()) for args in calls(self.parent, around.judged())]

    def __call__(self, scale: Tensor) -> float:
        inputs = spread(scale, self.fold.channels)
        changed = {path: rounded(weight, inputs, self.methods[path]) for path, weight in self.weights.items()}
        with substituted(self.around.model, changed):
            total = sum(float((self.parent(*args).float() - y).square().sum(dtype=torch.float64)) for args, y in self.seen)
        return self.around.processes.mean(total, sum(y.numel() for _, y in self.seen))


@contextmanager
def substituted(model: Model, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within this, dense linear modules have other weights."""
    held = {path: model.get_parameter(f"{path}.weight").data for path in weights}
    kept = {path: tensor.clone() for path, tensor in held.items()}
    for path, weight in weights.items():
        held[path].copy_(weight)
    try:
        yield
    finally:
        for path, weight in kept.items():
            held[path].copy_(weight)


# ---- folding -----------------------------------------------------------------------------------------------------------------


def weight_of(model: Model, path: str) -> Tensor:
    """The weight of a linear module, [outputs, inputs] float32, a copy."""
    module: Any = model.get_submodule(path)
    return module.dense_weight(torch.float32).detach().clone()


def apply_scale(model: Model, fold: Fold, scale: Tensor) -> bool:
    """Divide the source's outputs by a scale [channels] and multiply the readers' inputs by it, in place.

    False, and nothing is changed, where a weight would pass the range of its dtype.
    """
    inputs = spread(scale, fold.channels)
    edits = [*_divided(model, fold, scale), *((t, _wide(t) * inputs.to(_wide(t))) for t in _matrices(model, fold))]
    if not all(new.to(old.dtype).isfinite().all() for old, new in edits):
        return False
    for old, new in edits:
        old.copy_(new)  # in place: experts' weights are views of one block
    return True


def _matrices(model: Model, fold: Fold) -> Iterator[Tensor]:
    yield from (model.get_parameter(f"{path}.weight").data for path in fold.readers.modules)
    yield from (model.get_parameter(path).data for path in fold.readers.tensors)


def _divided(model: Model, fold: Fold, scale: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The source's tensors and what they become."""
    source: Any = model.get_submodule(fold.source)
    if fold.kind == "norm":
        offset = norm_offset(source)
        yield source.weight.data, (_wide(source.weight.data) + offset) / scale.to(_wide(source.weight.data)) - offset
        bias = getattr(source, "bias", None)
        if bias is not None:
            yield bias.data, _wide(bias.data) / scale.to(_wide(bias.data))
        return
    for tensor in (t.data for t in (source.weight, source.bias) if t is not None):
        view = fold.channels.outputs(tensor)
        by = scale.view(fold.channels.groups, fold.channels.width, *[1] * (tensor.dim() - 1))
        yield view, _wide(view) / by.to(_wide(view))


def norm_offset(norm: nn.Module) -> float:
    """What a norm adds to its stored weight."""
    return getattr(getattr(norm, "spec", None), "offset", 0.0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
