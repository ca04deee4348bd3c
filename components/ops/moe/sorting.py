"""Token rows in the order of their experts, and back.

N tokens, K choices a token, R = N K choices in all, E experts, M width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.components.contracts import Routing


class Sorted(NamedTuple):
    """Choices grouped by expert; those that are none come last.

    order: [R] the number (token * K + choice) of each. token: [R]. expert: [R], E for none. weight: [R, 1]. counts: [E] per expert.
    """

    order: Tensor
    token: Tensor
    expert: Tensor
    weight: Tensor
    counts: Tensor


def by_expert(routing: Routing) -> Sorted:
    """Sort the choices of a routing by expert, tokens of one expert in their own order."""
    flat = routing.experts.flatten()
    flat = torch.where(flat < 0, routing.count, flat)
    expert, order = flat.sort(stable=True)
    edges = torch.arange(routing.count + 1, device=flat.device)
    counts = torch.searchsorted(expert, edges).diff()
    return Sorted(order, order // routing.experts.shape[1], expert, routing.weights.flatten()[order, None], counts)


def weighted(run: Callable[[Tensor], Tensor], rows: Tensor, weight: Tensor, on_input: bool) -> Tensor:
    """``run(rows)`` times the weights, or ``run`` of the rows times the weights. rows [R, M], weight [R, 1] -> [R, M] float32."""
    if on_input:
        return run((rows * weight).to(rows.dtype)).to(weight.dtype)
    return run(rows) * weight


def in_runs(rows: Tensor, counts: Tensor, experts: Sequence[nn.Module] | nn.ModuleList) -> Tensor:
    """Each expert on its own rows. rows [R, M], sorted, counts [E] -> [R, M]; 0 for rows of no expert."""
    sizes = counts.tolist()
    *runs, rest = rows.split([*sizes, len(rows) - sum(sizes)])
    return torch.cat([*(expert(run) for expert, run in zip(experts, runs, strict=True) if len(run)), torch.zeros_like(rest)])


def combine(rows: Tensor, order: Tensor, choices: int) -> Tensor:
    """Sum over each token's choices. rows [R, M] in sorted order -> [N, M]; no atomics, so the same every time."""
    back = torch.empty_like(rows).index_copy(0, order, rows)
    return back.unflatten(0, (-1, choices)).sum(1)


def slots(experts: Tensor, order: Tensor, count: int, room: int) -> Tensor:
    """[E * room]: the choice that each place of each expert holds, R where it stays empty.

    experts: [R] of each choice, -1 for none. order: [R] the choices by priority; an expert that has no room leaves the last ones out.
    """
    total = len(order)
    ranked = experts[order]
    expert, by = torch.where(ranked < 0, count, ranked).sort(stable=True)
    start = torch.searchsorted(expert, torch.arange(count + 1, device=expert.device))
    place = torch.arange(total, device=expert.device) - start[expert]
    kept = (place < room) & (expert < count)
    slot = torch.where(kept, expert * room + place, count * room)  # the last one takes what is left out
    return torch.full((count * room + 1,), total, device=expert.device).index_copy(0, slot, order[by])[:-1]
