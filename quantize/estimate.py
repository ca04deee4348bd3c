"""What a quantization will take, reckoned from specs before any work."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zoo.components.contracts import Call
from zoo.components.spec import Child
from zoo.loading import GIB, NotEnoughMemory, available_bytes, weight_bytes
from zoo.model import Model
from zoo.quantize.activations import TOKENS_PER_PASS
from zoo.quantize.contracts import BlockwiseQuantizer, ChannelScaling, Quantizer, Transform
from zoo.quantize.distributed import Processes
from zoo.quantize.flow import siblings
from zoo.weights import linears

WIDE = 4  # bytes of what statistics and rounding are computed in
COPIES = 3  # of a matrix, while it is factored or rounded
LEARNED = 6  # copies of a layer's weights in a blockwise method: themselves, what is learned, its gradient, and three states of it


@dataclass(frozen=True)
class Estimate:
    """Bytes at the peak by what they are for, and seconds. device: where the stage lies; the activations between stages lie on the CPU.

    hessians: of the layer with the most; factor: of the largest, with its copies; stage: its weights, and what is rounded at a time,
    with copies, in float32; finished: quantized stages, where they were not in memory before; run: inside of one pass; activations:
    between stages. All of each process, of ``processes``, of which ``here`` share a machine; the first, which may have to gather all
    activations, is reckoned.
    """

    device: torch.device
    hessians: int
    factor: int
    stage: int
    finished: int
    run: int
    activations: int
    seconds: float
    processes: int = 1
    here: int = 1

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in ("hessians", "factor", "stage", "finished", "run", "activations")}
        said = ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)
        each = f" in each of {self.processes} processes" if self.processes > 1 else ""
        return f"about {_time(self.seconds)} and {_size(sum(parts.values()))} of memory{each} ({said})"

    def check(self) -> None:
        """Raise NotEnoughMemory where that is more than there is."""
        on_device = self.hessians + self.factor + self.stage + self.finished + self.run
        cpu = torch.device("cpu")
        needs = {self.device: on_device} | {cpu: self.here * (self.activations + (on_device if self.device.type == "cpu" else 0))}
        for device, need in needs.items():
            have = available_bytes(device)
            if need > have:
                raise NotEnoughMemory(
                    f"quantizing needs {_size(need)} on {device}, of which {_size(have)} are free; it takes {self}. Give fewer "
                    "samples, a shorter length or offload=folder against the activations; keep the widest modules by a rule, or take a "
                    "method without data (rtn), against Hessians and their factor"
                )


def estimate(model: Model, chosen: Mapping[str, Quantizer], shape: tuple[int, int] | None, transforms: Iterable[Transform],
             offload: Path | None, processes: Processes | None = None, kept: bool = False) -> Estimate:  # fmt: skip
    """shape: samples and length of the calibration data, None without. kept: activations are, in a work_dir."""
    processes = processes or Processes()
    modules = {path: child for path, child in linears(model.spec) if path in chosen}
    dtype, device = place(model)
    stages = [(layer, (model.spec.width, i)) for i, layer in enumerate(model.spec.layers)]
    squares = [_squares(model, i, modules) if shape else [] for i in range(len(stages))]
    blockwise = any(isinstance(method, BlockwiseQuantizer) for method in chosen.values())
    copies = 0 if shape is None or offload else 1 + blockwise
    samples = shape[0] if shape else 0
    held = processes.count(samples) + samples * (processes.size > 1 and (blockwise or kept))
    largest = max(LEARNED * _blockwise_cells(chosen, modules), COPIES * max(_cells(child) for child in modules.values()))
    lazy = any(p.is_meta for p in model.parameters())
    return Estimate(
        device,
        hessians=max((sum(own) for own in squares), default=0) * WIDE,
        factor=max((max(own, default=0) for own in squares), default=0) * WIDE * COPIES,
        stage=max(weight_bytes(layer, dtype, *at) for layer, at in stages) * lazy + largest * WIDE,
        finished=sum(_stored_bytes(chosen[path], child, dtype) for path, child in modules.items()) if lazy else 0,
        run=_widest(modules) * TOKENS_PER_PASS * dtype.itemsize if shape else 0,
        activations=held * copies * model.spec.width * dtype.itemsize * (shape[1] if shape else 0),
        seconds=_work(model, modules, chosen, shape, transforms) / _speed(device) / (1 if blockwise else processes.size),
        processes=processes.size,
        here=processes.here,
    )


def _cells(child: Child) -> int:
    return child.at[0] * child.at[1]


def _blockwise_cells(chosen: Mapping[str, Quantizer], modules: Mapping[str, Child]) -> int:
    """Weights that are quantized together, of the layer with the most."""
    layers: dict[str, int] = {}
    for path, child in modules.items():
        if isinstance(chosen[path], BlockwiseQuantizer):
            layer = ".".join(path.split(".")[:2])
            layers[layer] = layers.get(layer, 0) + _cells(child)
    return max(layers.values(), default=0)


def place(model: Model) -> tuple[torch.dtype, torch.device]:
    """The dtype of a model's weights and the device of its stages, which may not be loaded yet."""
    return (model.source.dtype, model.source.device) if model.device.type == "meta" else (model.dtype, model.device)


def _squares(model: Model, index: int, modules: Mapping[str, Child]) -> list[int]:
    """The sizes of a layer's Hessians; modules that share an input share one."""
    own = {path: child.at[0] ** 2 for path, child in modules.items() if path.startswith(f"layers.{index}.")}
    for group in siblings(model.spec.layers[index]):
        for name in [f"layers.{index}.{n}" for n in group if f"layers.{index}.{n}" in own][1:]:
            own.pop(name)
    return list(own.values())


def cost_of(model: Model, path: str, method: Quantizer) -> float:
    """Floating-point operations, roughly, that the rounding of one module takes."""
    module: Any = model.get_submodule(path)
    inputs, outputs = module.inputs, module.outputs
    return 100.0 * inputs * outputs + method.calibrated * inputs**2 * (2.0 * inputs + outputs)


def _stored_bytes(method: Quantizer, child: Child, dtype: torch.dtype) -> int:
    return weight_bytes(method.storage, dtype, *child.at)


def _widest(modules: Mapping[str, Child]) -> int:
    """Numbers that a token takes inside a layer at most: what its widest modules read and write, gate and up beside each other."""
    return 2 * max(child.at[0] + child.at[1] for child in modules.values())


def _work(model: Model, modules: Mapping[str, Child], chosen: Mapping[str, Quantizer], shape: tuple[int, int] | None,
          transforms: Iterable[Transform]) -> float:  # fmt: skip
    """Floating-point operations: passes of the data, and for each module its second moments, their factor and the rounding."""
    cells = sum(_cells(child) for child in modules.values())
    if shape is None:
        return 100.0 * cells
    samples, length = shape
    passes = 2 + 2 * sum(isinstance(t, ChannelScaling) for t in transforms)
    passes += max((m.passes(samples) for m in chosen.values() if isinstance(m, BlockwiseQuantizer)), default=0)
    once = samples * sum(layer.flops(Call(new=length), model.spec.width, i) for i, layer in enumerate(model.spec.layers))
    squares = [s for i in range(len(model.spec.layers)) for s in _squares(model, i, modules)]
    factored = sum(s**1.5 for s in squares) + sum(c.at[0] ** 2 * c.at[1] for p, c in modules.items() if chosen[p].calibrated)
    return passes * once + samples * length * sum(squares) + 2 * factored + 100.0 * cells


def _speed(device: torch.device) -> float:
    """Floating-point operations per second of a float32 product of a size that caches do not hold for long."""
    x = torch.ones(512, 512, device=device)
    float((x @ x)[0, 0])
    start = time.perf_counter()
    float((x @ x @ x)[0, 0])
    return 4 * 512**3 / (time.perf_counter() - start)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 8 else f"{count / (1 << 20):.1f} MiB"
