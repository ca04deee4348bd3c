"""Memory and size, counted to the byte: weights, cache, peaks, folders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.components.contracts import StoredLinear
from zoo.model import Model

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")  # writing 5 sets the kernel's record of the peak back to now (man 5 proc)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """bytes: every parameter and buffer once, tied ones too. components: bytes by place, layers summed (``layers.mixer``).
    linear_bits: see bits_per_weight. all_bits: bytes in memory over all weights, in bits. cache_bytes_per_token: of one row, all layers.
    """

    bytes: int
    components: dict[str, int]
    linear_bits: float | None
    all_bits: float
    cache_bytes_per_token: int


def memory(model: Model) -> Memory:
    """Count a model; one on the meta device counts as it would be."""
    components: Counter[str] = Counter()
    for name, tensor in _held(model):
        components[_component(name)] += tensor.nbytes
    total = components.total()
    return Memory(bytes=total, components=dict(components), linear_bits=bits_per_weight(model),
                  all_bits=8 * total / _weights(model, set()),
                  cache_bytes_per_token=model.spec.cache_bytes_per_token(model.dtype.itemsize))  # fmt: skip


def bits_per_weight(model: Model) -> float | None:
    """Bits a weight of the linear modules inside the layers, the ones that quantizers work on, as they are saved, with scales and
    all else that belongs to them; biases count neither as bits nor as weights. None where there are none.

    In memory a module may take more, where its product wants another layout; ``Memory.bytes`` counts that.
    """
    linears = list(_linears(model.layers))
    weights = sum(m.inputs * m.outputs for m in linears)
    saved = sum(t.nbytes for m in linears for name, t in _saved(m).items() if name != "bias")
    return 8 * saved / weights if weights else None


def disk_bytes(path: str | Path) -> int:
    """Bytes of a file, or of all files below a folder. Raises FileNotFoundError."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    return sum(f.stat().st_size for f in (path.rglob("*") if path.is_dir() else [path]) if f.is_file())


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _saved(linear: nn.Module) -> dict[str, Tensor]:
    return linear.canonical() if isinstance(linear, StoredLinear) else dict(_held(linear))


def _component(name: str) -> str:
    place = re.sub(r"^layers\.\d+\.", "layers.", name).split(".")
    return ".".join(place[:2]) if place[0] == "layers" else place[0]


def _is_linear(module: nn.Module) -> bool:
    return hasattr(module, "dense_weight")


def _linears(module: nn.Module) -> Iterator[Any]:
    for child in module.children():
        if _is_linear(child):
            yield child
        else:
            yield from _linears(child)


def _weights(module: Any, seen: set[int]) -> int:
    """Weights as the model sees them: a packed matrix counts inputs * outputs, an alias of a tensor that was counted nothing."""
    linear = _is_linear(module)
    held = [t for _, t in _held(module)] if linear else [*module._parameters.values(), *module._buffers.values()]
    new = [t for t in held if t is not None and id(t) not in seen]
    seen.update(map(id, new))
    if linear:
        bias = getattr(module, "bias", None)
        return (module.inputs * module.outputs + (0 if bias is None else bias.numel())) if new else 0
    return sum(t.numel() for t in new) + sum(_weights(child, seen) for child in module.children())


# ---- peaks -------------------------------------------------------------------------------------------------------------------


@dataclass
class PeakMemory:
    """start, peak: bytes at the beginning of the block and at most during it, None where it cannot be measured. what: of what."""

    what: str
    start: int | None
    peak: int | None = None


@contextmanager
def peak_memory(device: torch.device | str = "cpu") -> Iterator[PeakMemory]:
    """Measure a block: ``with peak_memory(model.device) as peak: ...``, then ``peak.peak``.

    CUDA: tensors that torch allocated there. CPU: resident memory of the whole process, libraries too, from the kernel's own record
    of the peak (Linux; one block at a time, for the process has one record). Elsewhere nothing is measured and ``what`` says so.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.init()  # before that its allocator knows no device whose record could be reset
        torch.cuda.reset_peak_memory_stats(device)
        result = PeakMemory("torch.cuda.max_memory_allocated: tensors on the GPU", torch.cuda.memory_allocated(device))
        yield result
        result.peak = torch.cuda.max_memory_allocated(device)
    elif device.type == "cpu" and _reset_peak():
        result = PeakMemory("VmHWM: resident memory of the whole process", _status("VmRSS"))
        yield result
        result.peak = _status("VmHWM")
    else:
        yield PeakMemory(f"not measured: this system keeps no peak for {device.type}", None)


def _reset_peak() -> bool:
    try:
        RESET.write_text("5")
    except OSError:
        return False
    return STATUS.exists()


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{STATUS} has no line {field}")
    return int(found[1]) * 1024
