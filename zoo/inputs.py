"""What a call may say of its tokens beside their ids: packed documents and coordinates. Shapes: B rows, T tokens, A axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import yaml
from torch import Tensor

from zoo.components.contracts import Pattern
from zoo.components.spec import dump, load

if TYPE_CHECKING:
    from zoo.model import ModelSpec


def checked_documents(documents: Tensor, spec: ModelSpec, like: tuple[int, int], device: torch.device, cached: bool) -> Tensor:
    """Documents [B, T] as int64. Raises ValueError for another shape, kind or device, with a cache, and where a layer would mix them."""
    _check(documents, "documents", list(like), device)
    if documents.numel() and device.type == "cpu" and int(documents.min()) < -1:
        raise ValueError(f"documents are numbered from 0, -1 is padding; the lowest is {int(documents.min())}")
    if cached:
        raise ValueError("a cache keeps one document a row; call the model on packed documents without one")
    for i, layer in enumerate(spec.layers):
        pattern = layer.mixer.pattern
        if not pattern.separates:
            hint = f"layers.{i}.mixer.pattern={_edit(pattern & load(Pattern, 'document'))}"
            raise ValueError(f"documents would be mixed by layer {i}, whose pattern {pattern.name} does not keep them apart; use {hint}")
    return documents.long()


def _edit(pattern: Pattern) -> str:
    return yaml.safe_dump(dump(pattern), default_flow_style=True, sort_keys=False, width=10_000).strip()


def restarting(documents: Tensor) -> Tensor:
    """Documents [B, T] -> each token's position in its document, -1 for padding; a document's tokens may lie apart."""
    order = documents.argsort(dim=1, stable=True)
    grouped = documents.gather(1, order)
    column = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(grouped, dtype=torch.bool)
    first[:, 1:] = grouped[:, 1:] != grouped[:, :-1]
    rank = column - torch.where(first, column, 0).cummax(1).values
    return torch.empty_like(rank).scatter_(1, order, rank).masked_fill(documents < 0, -1)


def checked_axes(axes: Tensor, spec: ModelSpec, like: tuple[int, int], device: torch.device) -> Tensor:
    """Coordinates [B, T, A] as int64. Raises ValueError for another shape, kind or device, and where no layer turns by A axes."""
    turned = {layer.mixer.position.axes_turned for layer in spec.layers} - {0}
    if not turned:
        name = spec.layers[0].mixer.position.name
        raise ValueError(f"axes are coordinates to turn by, but position {name} turns by the position alone; leave them out or use mrope")
    if axes.dim() != 3 or {axes.shape[2]} != turned:
        wanted = " and ".join(map(str, sorted(turned)))
        raise ValueError(f"axes must be [batch, tokens, {wanted}], as many coordinates as the positions turn by, got {list(axes.shape)}")
    _check(axes, "axes", [*like, axes.shape[2]], device)
    return axes.long()


def _check(given: Tensor, name: str, shape: list[int], device: torch.device) -> None:
    if list(given.shape) != shape:
        raise ValueError(f"{name} {list(given.shape)} must be {shape}, as the ids are")
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise ValueError(f"{name} must be whole numbers (int64), got {given.dtype}")
    if given.device != device:
        raise ValueError(f"{name} are on {given.device}, the ids on {device}; pass {name}.to(ids.device)")
