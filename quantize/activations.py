"""The activations between two stages, in memory or in a file."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from zoo.components.contracts import Step
from zoo.quantize.distributed import Processes
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

    def whole(self, processes: Processes) -> dict[str, Tensor]:
        """Those of all processes, on the first, by the names under which they are stored."""
        held = {"hidden": self.hidden} | ({} if self.reference is None else {"reference": self.reference})
        return {name: processes.whole(tensor, self._room) for name, tensor in held.items()}

    def passes(self, stage: Stage, most: int | None = None) -> Iterator[Callable[[], Tensor]]:
        """What runs the stage on the activations, batch by batch. most: samples, None for all."""
        return (run for _, run in self._batches(self.hidden[:most], stage.run))

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
        return tensor if self.offload is None or not tensor.numel() else self._room(tensor, len(tensor)).copy_(tensor)

    def _room(self, like: Tensor, samples: int) -> Tensor:
        """Room for so many samples, each like those of a tensor."""
        shape = samples, *like.shape[1:]
        if self.offload is None or not math.prod(shape):
            return like.new_empty(shape)
        with tempfile.NamedTemporaryFile(dir=self.offload, prefix="activations.") as file:  # the mapping outlives the name
            return torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=like.dtype).view(shape)


def rows_of_pass(length: int) -> int:
    return max(1, TOKENS_PER_PASS // length)
