"""Carries out transforms that rotate: the residual stream through every layer, and the values of each head.

A stream x becomes x Q. What makes it (embedding, o, down) is multiplied by Q on the side of its outputs; what reads it by Q on the
side of its inputs, after the gains of the norm between have been moved there, for only a norm without gains commutes with Q.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zoo.components.embed.tokens import Tokens
from zoo.components.head.lm import LMHead
from zoo.components.norm.identity import Identity
from zoo.components.norm.rms import RMS
from zoo.components.wiring._residual import Residual
from zoo.model import LayerSpec, Model, ModelSpec
from zoo.quantize.contracts import Turning
from zoo.quantize.flow import NORMED, Fold, layer_folds, ports, reading, writing
from zoo.quantize.report import Change
from zoo.quantize.scaling import norm_offset

BRANCHES = ("mixer", "mlp")


def refuses(spec: ModelSpec) -> Iterator[str]:
    """Reasons why a model's residual stream cannot be rotated with its architecture kept."""
    if not isinstance(spec.embed, Tokens) or spec.embed.position is not None or spec.embed.norm is not None:
        yield f"embed: {spec.embed.name} adds positions to the stream or norms it"
    if not isinstance(spec.head, LMHead):
        yield f"head: what head {spec.head.name} does with the stream is not known"
    for place, norm in [*((f"layers.{i}.norm", layer.norm) for i, layer in enumerate(spec.layers)), ("norm", spec.norm)]:
        if not isinstance(norm, (RMS, Identity)):
            yield f"{place}: norm {norm.name} looks at single channels (it takes their mean away, say)"
    for i, layer in enumerate(spec.layers):
        yield from (f"layers.{i}.{reason}" for reason in _layer_refuses(layer))


def _layer_refuses(layer: LayerSpec) -> Iterator[str]:
    wiring = layer.wiring
    if type(wiring) not in NORMED or "mixer_out_norm" in wiring.norms:
        yield f"wiring: {wiring.name} norms what a branch adds, or the stream itself, with gains for single channels"
    elif isinstance(wiring, Residual) and wiring.layer_scale is not None:
        yield f"wiring: {wiring.name} has a learned factor for single channels"
    for branch in BRANCHES:
        if ports(layer, branch, reading) is None or ports(layer, branch, writing) is None:
            yield f"{branch}: what reads and writes the stream is not known"


def untied(spec: ModelSpec) -> ModelSpec:
    """The spec with a head of its own: the final norm's gains go into the head and not into the embedding."""
    if not isinstance(spec.head, LMHead):
        return spec
    return dataclasses.replace(spec, head=dataclasses.replace(spec.head, tied=False))


class Turner:
    """One rotation of a model, part by part, each once its weights are loaded."""

    def __init__(self, model: Model, transform: Turning):
        self.model, self.transform = model, transform
        self.stream = transform.stream(model.spec.width)

    def begin(self) -> list[Change]:
        """Rotate the embedding, which is loaded, and give a tied head a matrix of its own."""
        if self.stream is None:
            return []
        embedding: Any = self.model.embed
        tied = self.model.spec.head.tie()
        if tied:
            self.model.spec = untied(self.model.spec)
            head: Any = self.model.head
            head.out.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
        _edit(embedding.weight, self._turned)
        own = {"notice": "no longer shared with the embedding: it takes over the final norm's gains"}
        return [Change(self.transform.name, "head.out", own)] if tied else []

    def layer(self, index: int) -> None:
        """Rotate a layer."""
        spec, path = self.model.spec.layers[index], f"layers.{index}"
        if self.stream is not None:
            self._stream(spec, path)
        folds, _ = layer_folds(spec, self.model.spec.width)
        for fold in (fold.below(path) for fold in folds if fold.kind == "value" and fold.mixes):
            self._values(fold)

    def _stream(self, spec: LayerSpec, path: str) -> None:
        normed = {branch: norm for norm, branches in NORMED[type(spec.wiring)].items() for branch in branches}
        for branch in BRANCHES:
            norm = self.model.get_submodule(f"{path}.{normed[branch]}") if branch in normed else None
            read, written = ports(spec, branch, reading), ports(spec, branch, writing)
            assert read is not None
            assert written is not None
            self._read(gains(norm), *(self._matrix(f"{path}.{n}") for n in read.modules), *(
                self.model.get_parameter(f"{path}.{n}") for n in read.tensors))  # fmt: skip
            for name in written.modules:
                self._write(self.model.get_submodule(f"{path}.{name}"))
        for norm in normed.values():
            level(self.model.get_submodule(f"{path}.{norm}"))

    def head(self) -> None:
        """Rotate the head, with the final norm."""
        if self.stream is not None:
            self._read(gains(self.model.norm), self._matrix("head.out"))
            level(self.model.norm)

    def _read(self, gain: Tensor | None, *matrices: Tensor) -> None:
        for matrix in matrices:
            _edit(matrix, lambda w: self._turned(w if gain is None else w * gain))

    def _write(self, module: Any) -> None:
        _edit(module.weight, lambda w: self._turned(w.t()).t())
        if module.bias is not None:
            _edit(module.bias, self._turned)

    def _turned(self, rows: Tensor) -> Tensor:
        """[.., width] -> the same, rotated."""
        assert self.stream is not None
        return rows @ self.stream.to(rows.device)

    def _values(self, fold: Fold) -> None:
        matrix = self.transform.head(fold.channels.width)
        if matrix is None:
            return
        source: Any = self.model.get_submodule(fold.source)
        matrix = matrix.to(source.weight.device)
        for tensor in (t.data for t in (source.weight, source.bias) if t is not None):
            _edit(fold.channels.outputs(tensor), lambda v: torch.einsum("gw...,wx->gx...", v, matrix))
        for path in fold.readers.modules:
            _edit(fold.channels.inputs(self._matrix(path).data), lambda o: o @ matrix)

    def _matrix(self, path: str) -> Tensor:
        module: Any = self.model.get_submodule(path)
        return module.weight


def gains(norm: nn.Module | None) -> Tensor | None:
    """What a norm multiplies by, [width] float64; None for nothing."""
    weight = getattr(norm, "weight", None)
    return None if weight is None or norm is None else weight.detach().double() + norm_offset(norm)


def level(norm: Any) -> None:
    """Make a norm's gains 1."""
    if getattr(norm, "weight", None) is not None:
        norm.weight.data.fill_(1 - norm_offset(norm))


def _edit(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Change a tensor in place, in float64."""
    tensor.data.copy_(change(tensor.data.double()))
