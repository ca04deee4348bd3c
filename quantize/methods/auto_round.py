"""AutoRound: learn where each weight is rounded to, and each group's range, from the output of a whole layer.

Shape legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.registry import part
from zoo.quantize.contracts import Block, BlockwiseQuantizer, IntegerQuantizer, Quantized, Quantizer
from zoo.quantize.stats.hessian import Hessian

BACKWARD = 3  # passes that a forward and a backward one take together


@part(Quantizer, "auto_round", source="Cheng et al. 2023, arXiv:2309.05516, section 3; the default of 200 iterations: intel/auto-round")
@dataclass(frozen=True, kw_only=True)
class AutoRound(IntegerQuantizer, BlockwiseQuantizer):
    """Signed gradient descent on rounding offsets in -1/2 .. 1/2 and on shares of each group's range, for a layer's squared error.

    iterations: steps of a layer; batch: samples of a step; learning_rate: of the first step, falling to 0, None: 1 / iterations.
    seed: of the samples' order. Of the start, the step of least error on its samples and the last one, that is kept which has the
    least error on all samples. Other fields: see rtn.
    """

    group_size: int | None = 128
    iterations: int = 200
    batch: int = 8
    learning_rate: float | None = None
    seed: int = 0

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.scale_search != "minmax":
            yield "scale_search", "auto_round learns the range itself, starting from minmax"
        for name in ("iterations", "batch"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"
        if self.learning_rate is not None and not 0 < self.learning_rate <= 1:
            yield "learning_rate", f"must be above 0 and at most 1, got {self.learning_rate}"

    def passes(self, samples: int) -> float:
        return BACKWARD * self.iterations * min(self.batch, samples) / samples + 3

    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        return Quantized(Rounding(weight, self).encoded(), {"fallback": "rtn: not in a layer"})

    def quantize_block(self, block: Block) -> dict[str, Quantized]:
        roundings = {}
        for path, weight in block.weights.items():
            method = block.methods[path]
            assert isinstance(method, IntegerQuantizer)
            roundings[path] = Rounding(weight, method)
        before, after = self._learn(block, roundings)
        facts = {"layer_error": after, "layer_error_before": before}
        return {path: Quantized(rounding.encoded(), dict(facts)) for path, rounding in roundings.items()}

    def _learn(self, block: Block, roundings: Mapping[str, Rounding]) -> tuple[float, float]:
        """Leave the best values in the roundings; the relative error of the layer's output before and after."""
        values = [value for rounding in roundings.values() for value in rounding.values]
        start = [value.detach().clone() for value in values]
        best, least = start, torch.inf
        for share, rows in self._schedule(len(block.inputs)):
            with torch.enable_grad():
                error = self._error(block, roundings, rows)
                gradients = torch.autograd.grad(error, values, allow_unused=True, materialize_grads=True)
            if float(error) < least:
                best, least = [value.detach().clone() for value in values], float(error)
            for rounding, slopes in zip(roundings.values(), zip(*[iter(gradients)] * 3, strict=True), strict=True):
                rounding.descend(slopes, share)
        last = [value.detach().clone() for value in values]
        errors = [self._total(block, roundings, values, tried) for tried in (start, best, last)]
        chosen = min(range(3), key=errors.__getitem__)
        _set(values, (start, best, last)[chosen])
        return errors[0], errors[chosen]

    def _schedule(self, samples: int) -> Iterator[tuple[float, Tensor]]:
        """(learning rate, numbers of the samples) of each step."""
        generator = torch.Generator().manual_seed(self.seed)
        first = 1 / self.iterations if self.learning_rate is None else self.learning_rate
        for step in range(self.iterations):
            rows = torch.randperm(samples, generator=generator)[: self.batch]
            yield first * (1 - step / self.iterations), rows

    def _error(self, block: Block, roundings: Mapping[str, Rounding], rows: Tensor) -> Tensor:
        """Squared output error over these samples, relative to the targets' mean square: large enough for gradients in half precision."""
        device = next(iter(block.weights.values())).device
        y = block.run(block.inputs[rows].to(device), {path: rounding.weight() for path, rounding in roundings.items()})
        target = block.targets[rows].to(device).float()
        return (y.float() - target).square().sum() / target.square().mean().clamp(min=torch.finfo(torch.float32).tiny)

    def _total(self, block: Block, roundings: Mapping[str, Rounding], values: list[Tensor], tried: list[Tensor]) -> float:
        """Relative squared error over all samples with other values."""
        _set(values, tried)
        batches = torch.arange(len(block.inputs)).split(self.batch)
        errors = [float(self._error(block, roundings, rows)) / block.targets[rows].numel() * len(rows) for rows in batches]
        return sum(errors) / len(block.inputs)


class Rounding:
    """One weight's learned rounding: offset [N, K] is added before rounding, low and high [N, G] multiply its groups' ranges."""

    def __init__(self, weight: Tensor, method: IntegerQuantizer):
        self.original, self.method, self.grid = weight, method, method.storage.grid
        groups = self.grid.groups(weight.shape[1])
        least, greatest = weight.unflatten(1, (groups, -1)).aminmax(dim=-1)
        self.least, self.greatest = least.clamp(max=0), greatest.clamp(min=0)
        self.offset = torch.zeros_like(weight).requires_grad_()
        self.low, self.high = (torch.ones_like(least).requires_grad_() for _ in range(2))

    @property
    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.offset, self.low, self.high

    def descend(self, slopes: tuple[Tensor, ...], rate: float) -> None:
        """One step of signed gradient descent."""
        for value, slope in zip(self.values, slopes, strict=True):
            value.data.sub_(slope.nan_to_num().sign(), alpha=rate)
        self.offset.data.clamp_(-0.5, 0.5)
        self.low.data.clamp_(0, 1)
        self.high.data.clamp_(0, 1)

    def spacing(self) -> tuple[Tensor, Tensor]:
        """Scale and zero, [N, G] float32 of values that can be stored; gradients pass through their rounding."""
        low, high = self.least * self.low, self.greatest * self.high
        if self.grid.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        tiny = torch.finfo(self.grid.scale_dtype).tiny
        scale = (high - low) / self.grid.top
        scale = (scale + (scale.to(self.grid.scale_dtype).to(scale.dtype) - scale).detach()).clamp(min=tiny)
        zero = through(-low / scale).clamp(0, self.grid.top)
        return scale, torch.full_like(zero, self.grid.middle) if self.grid.symmetric else zero

    def codes(self, scale: Tensor, zero: Tensor) -> Tensor:
        """[N, G, K / G] float32; gradients pass through the rounding."""
        grouped = (self.original.unflatten(1, (scale.shape[1], -1)) / scale[..., None]) + self.offset.unflatten(1, (scale.shape[1], -1))
        return (through(grouped) + zero[..., None]).clamp(0, self.grid.top)

    def weight(self) -> Tensor:
        """[N, K] as it would be stored."""
        scale, zero = self.spacing()
        return ((self.codes(scale, zero) - zero[..., None]) * scale[..., None]).flatten(1)

    def encoded(self) -> dict[str, Tensor]:
        """The storage's tensors."""
        scale, zero = (x.detach() for x in self.spacing())
        codes = self.codes(scale, zero).detach().flatten(1).to(torch.uint8)
        return self.method.storage.encode(codes, scale.to(self.grid.scale_dtype), zero.to(torch.uint8))


def through(x: Tensor) -> Tensor:
    """Rounded; its gradient is that of x."""
    return x + (x.round() - x).detach()


def _set(values: list[Tensor], new: list[Tensor]) -> None:
    for value, one in zip(values, new, strict=True):
        value.data.copy_(one)
