"""The activations between two stages, in memory or in a file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from zoo.components.contracts import Step
from zoo.quantize.stage import Stage

TOKENS_PER_PASS = 4096

Run = Callable[[Tensor, Step], Tensor]


class Activations:
    """What enters the next stage, [samples, length, width] on the CPU.

    hidden: as the quantized stages before leave it; empty without data. reference: as they left it before they were quantized, for
    blockwise methods, else None. offload: a folder in whose file system both lie, in files that are gone when the run is.
    """

    def __init__(self, device: torch.device, offload: Path | None = None):
        self.device, self.offload = device, offload
        self.hidden, self.reference = torch.empty(0), None

    def take(self, hidden: Tensor, reference: Tensor | None) -> None:
        self.hidden, self.reference = self._held(hidden), None if reference is None else self._held(reference)

    def tensors(self) -> dict[str, Tensor]:
        """By the names under which they are stored."""
        return {"hidden": self.hidden} | ({} if self.reference is None else {"reference": self.reference})

    @property
    def tokens(self) -> int:
        """Tokens of one pass."""
        return rows_of_pass(self.hidden.shape[1]) * self.hidden.shape[1] if self.hidden.numel() else 0

    def passes(self, stage: Stage) -> Iterator[Callable[[], Tensor]]:
        """What runs the stage on the activations, batch by batch."""
        return (run for _, run in self._batches(self.hidden, stage.run))

    def advance(self, stage: Stage) -> None:
        """Let the activations that enter a stage become those that leave it."""
        for rows, run in self._batches(self.hidden, stage.run):
            self.hidden[rows] = run().cpu()

    def advance_reference(self, stage: Stage) -> None:
        """The same for those of the model as it was; to be called before the stage is quantized."""
        if self.reference is not None:
            for rows, run in self._batches(self.reference, stage.run):
                self.reference[rows] = run().cpu()

    def _batches(self, held: Tensor, run: Run) -> Iterator[tuple[slice, Callable[[], Tensor]]]:
        """(rows, what runs a stage on them)."""
        if not held.numel():
            return
        length = held.shape[1]
        size = rows_of_pass(length)
        for start in range(0, len(held), size):
            rows = slice(start, start + size)
            x = held[rows].to(self.device)
            yield rows, partial(run, x, Step.plain(0, len(x), length, self.device))

    def _held(self, tensor: Tensor) -> Tensor:
        if self.offload is None or not tensor.numel():
            return tensor
        with tempfile.NamedTemporaryFile(dir=self.offload, prefix="activations.") as file:  # the mapping outlives the name
            mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        return mapped.copy_(tensor)


def rows_of_pass(length: int) -> int:
    return max(1, TOKENS_PER_PASS // length)
