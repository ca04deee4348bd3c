"""Which device holds which part of a model that is larger than one device.

The embedding, each layer, the final norm and the head are its *units*: none is split. A place is the number of a GPU, ``"cpu"`` or
``"disk"``. Units that lie on the CPU beside a GPU, or on disk, run on the main device, to which their weights come for each call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import convert_file_size_to_int, get_balanced_memory, infer_auto_device_map

from zoo.components import registry
from zoo.components.contracts import unfilled
from zoo.loading import GIB, DeviceMap, NotEnoughMemory, available_bytes
from zoo.model import ModelSpec

Place = int | str
CPU, DISK = "cpu", "disk"
PLANNED = ("auto", "balanced")
HEADROOM = 0.9  # of a device's free memory, where no limit is given; the rest is for activations and caches


@dataclass(frozen=True)
class Plan:
    """Where each unit lies. places: by unit, in the order in which they run. sizes: their bytes. limits: bytes that a place may hold."""

    places: dict[str, Place]
    sizes: dict[str, int]
    limits: dict[Place, int]

    @property
    def main(self) -> torch.device:
        """Where inputs, outputs and the units that are streamed belong: the first GPU, or the CPU where there is none."""
        gpus = [place for place in (*self.places.values(), *self.limits) if isinstance(place, int)]
        return torch.device("cuda", min(gpus)) if gpus else torch.device(CPU)

    def device(self, unit: str) -> torch.device:
        """Where a unit runs."""
        place = self.places[unit]
        return torch.device("cuda", place) if isinstance(place, int) else self.main

    def streamed(self, unit: str) -> bool:
        """Whether a unit's weights come for each call and leave after it."""
        place = self.places[unit]
        return place == DISK or (place == CPU and self.main.type != CPU)

    def held(self) -> Counter[Place]:
        """Bytes of weights at each place."""
        held: Counter[Place] = Counter()
        for unit, place in self.places.items():
            held[place] += self.sizes[unit]
        return held

    def rows(self) -> Iterator[tuple[str, Place, int, bool]]:
        """(units, place, bytes, streamed) of each run of neighbouring units at one place."""
        units = list(self.places)
        starts = [i for i, unit in enumerate(units) if not i or self.places[unit] != self.places[units[i - 1]]]
        for start, end in zip(starts, [*starts[1:], len(units)], strict=True):
            run = units[start:end]
            words = run[0] if len(run) == 1 else f"{run[0]} .. {run[-1]}"
            yield words, self.places[run[0]], sum(self.sizes[u] for u in run), self.streamed(run[0])


def plan(spec: ModelSpec, dtype: torch.dtype, device_map: DeviceMap, max_memory: Mapping[int | str, int | str] | None = None) -> Plan:
    """Where the units of a model of any size lie; it is planned on the meta device.

    device_map: "auto" fills one device after the other, GPUs first, then the CPU, then the disk; "balanced" fills the GPUs alike; or a
    place for each module, {"embed": 0, "layers": 0, "layers.31": "cpu", "norm": 0, "head": 0}, "" for the whole model; the longest
    name counts. max_memory: bytes, or words as "10GiB", that the weights at a place may take; what devices have free by default.

    Raises ValueError for maps and limits that say nothing of this model. Whether it fits is ``unfit``'s to say.
    """
    limits = read_limits(max_memory)
    sizes = unit_bytes(spec, dtype)
    if not isinstance(device_map, str):
        return Plan(_as_written(device_map, list(sizes)), sizes, limits)
    if device_map not in PLANNED:
        raise ValueError(f"device_map={device_map!r} is no choice{registry.nearest(device_map, PLANNED)}, or give a place for each module")
    found = _planned(spec, dtype, limits, balanced=device_map == "balanced")
    places = {unit: _longest(found, unit) for unit in sizes}
    if spec.head.tie():
        places["head"] = places["embed"]  # they share their weight
    return Plan(places, sizes, limits)


def _planned(spec: ModelSpec, dtype: torch.dtype, limits: Mapping[Place, int], *, balanced: bool) -> dict[str, Place]:
    """Accelerate's plan: a place by module name, possibly of a module around the units."""
    with unfilled():
        model = spec.build()
    whole = sorted({type(model.get_submodule(unit)).__name__ for unit in spec.children()})
    kinds: dict[str, Any] = {name: getattr(torch, info.dtype) if info.dtype else dtype for name, info in spec.tensors().items()}
    most: dict[int | str, int | str] = dict(limits)
    if balanced:
        most |= get_balanced_memory(model, most, no_split_module_classes=whole, special_dtypes=kinds) or {}
    found = infer_auto_device_map(model, most, whole, special_dtypes=kinds, clean_result=False, offload_buffers=True)
    return {name: read_place(place, name) for name, place in found.items()}


def unit_bytes(spec: ModelSpec, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each unit's own weights, a tied head's being the embedding's."""
    tie = spec.head.tie()
    sizes = dict.fromkeys(spec.children(), 0)
    for name, info in spec.tensors().items():
        if not tie or name != f"head.{tie[0]}":
            sizes[unit_of(name)] += math.prod(info.shape) * (getattr(torch, info.dtype) if info.dtype else dtype).itemsize
    return sizes


def unit_of(name: str) -> str:
    """The unit that a tensor or module lies in: ``layers.3`` of ``layers.3.mlp.down``."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "layers" else first


def read_limits(max_memory: Mapping[int | str, int | str] | None) -> dict[Place, int]:
    """Bytes by place, GPUs first; by default what is free. Raises ValueError for what is no place or no size."""
    if max_memory is None:
        gpus = {i: int(HEADROOM * available_bytes(torch.device("cuda", i))) for i in range(torch.cuda.device_count())}
        return {**gpus, CPU: int(HEADROOM * available_bytes(torch.device(CPU)))}
    found: dict[Place, int] = {}
    for key, size in max_memory.items():
        place = read_place(key, "max_memory")
        try:
            found[place] = convert_file_size_to_int(size)
        except ValueError:
            raise ValueError(f"max_memory: {size!r} for {key} is no size; write a number of bytes, or a text like '10GiB'") from None
        if found[place] < 0:
            raise ValueError(f"max_memory: {size!r} for {key} must not be negative")
    return {place: found[place] for place in sorted(found, key=lambda p: (not isinstance(p, int), p))}


def read_place(word: int | str | torch.device, where: str) -> Place:
    """A place from a GPU's number, "cuda:1", "cpu" or "disk". Raises ValueError for anything else."""
    text = str(word)
    if text in (CPU, DISK):
        return text
    number = text.removeprefix("cuda:")
    if text == "cuda":
        return 0
    if isinstance(word, bool) or not (number.isascii() and number.isdigit()):
        raise ValueError(f"{where}: {word!r} is no place; give the number of a GPU, 'cpu' or 'disk'")
    return int(number)


def _as_written(given: Mapping[str, int | str | torch.device], units: list[str]) -> dict[str, Place]:
    """The map that a caller wrote, by unit. Raises ValueError, naming all of them, for modules that are missing, unknown or split."""
    known = {"", "layers", *units}
    problems = []
    for name in given:
        if name not in known:
            inside = unit_of(name) in known
            why = f"lies inside {unit_of(name)}, which is not split" if inside else f"is no module{registry.nearest(name, sorted(known))}"
            problems.append(f"{name!r} {why}")
    found = {name: read_place(place, f"device_map[{name!r}]") for name, place in given.items()}
    missing = [unit for unit in units if _around(found, unit) is None]
    if missing:
        problems.append(f"no place for {', '.join(missing[:8])}{f' and {len(missing) - 8} more' if len(missing) > 8 else ''}")
    if problems:
        raise ValueError(f"device_map: {'; '.join(problems)}")
    return {unit: _longest(found, unit) for unit in units}


def _around(found: Mapping[str, Place], unit: str) -> str | None:
    """The longest name in a map that is the unit's or that of a module around it."""
    return next((name for name in (unit, unit.partition(".")[0], "") if name in found), None)


def _longest(found: Mapping[str, Place], unit: str) -> Place:
    name = _around(found, unit)
    assert name is not None
    return found[name]


def unfit(wanted: Plan, spec: ModelSpec, dtype: torch.dtype) -> list[str]:
    """What of a plan does not fit, in words; empty where all does. The disk counts as large enough unless it has a limit."""
    held, found = wanted.held(), []
    for place, size in held.items():
        most = wanted.limits.get(place, None if place == DISK else 0)
        if most is not None and size > most:
            found.append(f"{words(place)} would hold {size / GIB:.3f} GiB of weights, it has {most / GIB:.3f} GiB")
    main: Place = wanted.main.index if wanted.main.type == "cuda" else CPU
    room = wanted.limits.get(main, 0) - held[main]
    tie = spec.head.tie()
    tied = math.prod(spec.tensors()[f"embed.{tie[1]}"].shape) * dtype.itemsize if tie else 0
    working = {unit: wanted.sizes[unit] + tied * (unit == "head") for unit in wanted.places if wanted.streamed(unit)}
    if working and max(working.values()) > room:
        largest = max(working, key=lambda unit: working[unit])
        found.append(
            f"{largest} needs {working[largest] / GIB:.3f} GiB of {words(main)} while it runs, where {room / GIB:.3f} GiB are left"
        )
    return found


def check_fits(wanted: Plan, spec: ModelSpec, dtype: torch.dtype, reference: str, *, disk: bool) -> None:
    """Raise NotEnoughMemory, saying what does not fit, before anything is read. disk: there is an offload folder."""
    problems = unfit(wanted, spec, dtype)
    left = [(units, size) for units, place, size, _ in wanted.rows() if place == DISK]
    if left and not disk:
        what = ", ".join(units for units, _ in left)
        problems.insert(0, f"{what} ({sum(size for _, size in left) / GIB:.3f} GiB) go to the disk, and there is no offload_folder")
    if problems:
        raise NotEnoughMemory(
            f"{reference}: the model does not fit: {'; '.join(problems)}. Give offload_folder=, a larger max_memory=, "
            "a smaller dtype, or a quantized checkpoint"
        )


def check_devices(wanted: Plan) -> None:
    """Raise ValueError for GPUs that this machine does not have."""
    have = torch.cuda.device_count()
    absent = sorted({place for place in wanted.places.values() if isinstance(place, int) and place >= have})
    if absent or (wanted.main.type == "cuda" and wanted.main.index >= have):
        named = absent or [wanted.main.index]
        raise ValueError(f"device_map needs {', '.join(map(words, named))}; this machine has {have} GPUs")


def words(place: Place) -> str:
    return f"GPU {place}" if isinstance(place, int) else {CPU: "the CPU", DISK: "the disk"}[place]
