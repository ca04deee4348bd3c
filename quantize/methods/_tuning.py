"""Tuning of what a quantized layer still holds in floats, signs, scales and codebooks, for the layer's squared output error.

After QuIP#'s and AQLM's fine-tuning of blocks, which tune norms and weights still to be quantized besides.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.quantize.contracts import Block, BlockwiseQuantizer, Quantized

BETAS = (0.9, 0.95)  # of Adam
HELD_OUT = 4  # one sample in so many is left out of the steps, and says when to end
PATIENCE = 3  # epochs without a gain
BACKWARD = 3  # passes that a forward and a backward one take together


class Tunable:
    """A quantized weight and the values in it that may be tuned. values: near 1 in size, they need gradients."""

    values: list[Tensor]

    def weight(self) -> Tensor:
        """[outputs, inputs] float32, differentiable in the values."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Those of the storage's tensors that the values are."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Tuned(BlockwiseQuantizer):
    """A method whose results are tuned, a layer at a time, once all of the layer's modules are quantized.

    epochs: at most, over three quarters of the samples; the state of least error on the others is kept, be it the first. batch:
    samples of a step. learning_rate: of Adam; the values tuned are near 1.
    """

    epochs: int = 5
    batch: int = 8
    learning_rate: float = 5e-4

    @abstractmethod
    def tunable(self, result: Quantized, outputs: int, inputs: int) -> Tunable: ...

    def passes(self, samples: int) -> float:
        return self.epochs * (BACKWARD + 1) + 1

    def quantize_block(self, block: Block) -> dict[str, Quantized]:
        results, tunables = {}, {}
        for path, weight in block.weights.items():
            method = block.methods[path]
            if not isinstance(method, Tuned):
                raise ValueError(f"{path}: {method.name} and {self.name} cannot be tuned together in a layer; give both the same method")
            results[path] = method.quantize(weight, block.hessians.get(path))
            tunables[path] = method.tunable(results[path], *weight.shape)
        facts = Tuning(block, tunables, self).run()
        return {path: Quantized(r.tensors | tunables[path].tensors(), r.facts | facts) for path, r in results.items()}


class Tuning:
    """The tuning of one layer."""

    def __init__(self, block: Block, tunables: Mapping[str, Tunable], method: Tuned):
        self.block, self.tunables, self.method = block, tunables, method
        self.values = [value for tunable in tunables.values() for value in tunable.values]
        numbers = torch.arange(len(block.inputs))
        held_out = numbers % HELD_OUT == HELD_OUT - 1
        self.steps, self.checks = (numbers[~held_out], numbers[held_out]) if held_out.any() else (numbers, numbers)

    def run(self) -> dict[str, Any]:
        """Leave the best values in place, and say what they are worth: relative squared errors on the samples held out."""
        generator = torch.Generator().manual_seed(0)
        adam = torch.optim.Adam(self.values, lr=self.method.learning_rate, betas=BETAS)
        first = least = self._held_out_error()
        best, stale = self._copies(), 0
        for _ in range(self.method.epochs):
            for rows in self.steps[torch.randperm(len(self.steps), generator=generator)].split(self.method.batch):
                self._step(adam, rows)
            error = self._held_out_error()
            stale = 0 if error < least else stale + 1
            if error < least:
                best, least = self._copies(), error
            if stale == PATIENCE:
                break
        for value, kept in zip(self.values, best, strict=True):
            value.data.copy_(kept)
        return {"layer_error": least, "layer_error_before": first}

    def _step(self, adam: torch.optim.Adam, rows: Tensor) -> None:
        with torch.enable_grad():
            adam.zero_grad()
            self._error(rows).backward()
        adam.step()

    def _error(self, rows: Tensor) -> Tensor:
        """Squared output error over these samples, relative to the targets' squares."""
        device = self.values[0].device
        y = self.block.run(self.block.inputs[rows].to(device), {path: t.weight() for path, t in self.tunables.items()})
        target = self.block.targets[rows].to(device).float()
        return (y.float() - target).square().sum() / target.square().sum().clamp(min=torch.finfo(torch.float32).tiny)

    @torch.no_grad()
    def _held_out_error(self) -> float:
        batches = self.checks.split(self.method.batch)
        return sum(float(self._error(rows)) * len(rows) for rows in batches) / len(self.checks)

    def _copies(self) -> list[Tensor]:
        return [value.detach().clone() for value in self.values]
