"""A model whose units lie at several places: its weights arrive there, and come to where they are used.

Accelerate's hooks move inputs to each unit's device and stream the weights of those that are kept elsewhere.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import PrefixedDataset, send_to_device, set_module_tensor_to_device
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from zoo.checkpoint import Checkpoint, CheckpointError
from zoo.components.contracts import ExpertsModule, HeadModule, Prepared, StoredLinear
from zoo.loading import GIB, NotEnoughMemory, stored_tensor
from zoo.model import Model
from zoo.placement import DISK, Plan, unit_of
from zoo.weights import Entry, aligned, below, fill_module

PREFIX = "zoo-offload-"


class Offloaded(Mapping[str, Tensor]):
    """The tensors that lie in host memory or on disk, by name.

    On disk each is a file of its own in a new folder inside ``folder``, locked while the model is in use and removed with it. What
    killed processes left behind in ``folder`` is removed by the next one.
    """

    def __init__(self, folder: Path | None):
        self._host: dict[str, Tensor] = {}
        self._files: dict[str, Path] = {}
        self._same: dict[str, str] = {}
        self.folder = None if folder is None else self._opened(folder)

    def _opened(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{PREFIX}lock"):  # a folder between its creation and its lock looks abandoned
            for old in folder.glob(f"{PREFIX}*/"):
                remove_abandoned(old)
            own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
            lock = FileLock(own / "lock")
            lock.acquire()
        weakref.finalize(self, _remove, own, lock)
        return own

    def __deepcopy__(self, memo: dict[int, Any]) -> Offloaded:
        return self  # what is kept is only read

    def keep(self, name: str, tensor: Tensor) -> None:
        """Hold a tensor in host memory."""
        self._host[name] = tensor

    def alias(self, name: str, of: str) -> None:
        self._same[name] = of

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor on disk. Raises OSError where it cannot be written."""
        assert self.folder is not None
        path = self.folder / f"{name}.safetensors"
        aside = path.with_suffix(".part")
        try:
            save_file({name: tensor.contiguous()}, aside)
        except SafetensorError as e:
            raise OSError(f"{path}: the tensor cannot be written ({e}); free some space, or choose another offload_folder") from None
        aside.rename(path)
        self._files[name] = path

    def __getitem__(self, name: str) -> Tensor:
        name = self._same.get(name, name)
        if name in self._host:
            return self._host[name]
        path = self._files[name]
        try:
            tensor = load_file(path)[name]
        except (OSError, SafetensorError, KeyError) as e:
            raise CheckpointError(
                f"{path}: offloaded weights cannot be read ({e}); the file was damaged or removed while the model is in use. "
                "Load the model again"
            ) from None
        return tensor if aligned(tensor) else tensor.clone()

    def __iter__(self) -> Iterator[str]:
        return iter((*self._host, *self._files, *self._same))

    def __len__(self) -> int:
        return len(self._host) + len(self._files) + len(self._same)


def remove_abandoned(folder: Path) -> None:
    """Remove an offload folder unless a living process uses it."""
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return
    _remove(folder, lock)


def _remove(folder: Path, lock: FileLock) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()


class Streaming:
    """What carries out a plan for one model: it takes the weights in, and moves them and the inputs in every call."""

    def __init__(self, plan: Plan, folder: str | Path | None):
        self.plan = plan
        needs_disk = DISK in plan.places.values()
        self.weights = Offloaded(Path(folder).expanduser() if needs_disk and folder is not None else None)
        if self.weights.folder is not None:
            check_disk(self.weights.folder, plan.held()[DISK])

    @property
    def device(self) -> torch.device:
        """Where inputs go and outputs come from."""
        return self.plan.main

    def attach(self, model: Model) -> None:
        """Make a model, still on the meta device, follow the plan. Raises ValueError for parts that cannot."""
        check_parts(model, self.plan)
        for unit in self.plan.places:
            self._hook(model.get_submodule(unit), unit)
        model.placement = self

    def _hook(self, module: nn.Module, unit: str) -> None:
        streamed, last = self.plan.streamed(unit), unit == "head"
        kept = PrefixedDataset(self.weights, f"{unit}.")
        hook = AlignDevicesHook(self.plan.device(unit), streamed, weights_map=kept, offload_buffers=True, place_submodules=True)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            moved = hook.pre_forward(module, *args, **kwargs)
            if streamed:
                prepare(module)
            return moved

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            done = hook.post_forward(module, output)
            return send_to_device(done, self.device) if last else done

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)  # weights leave after calls that fail, too

    def fill(self, model: Model, table: Iterable[Entry], checkpoint: Checkpoint, dtype: torch.dtype, prefix: str) -> None:
        """Read the entries below ``prefix``, one at a time, each straight to its place."""
        infos, last = model.spec.tensors(), None
        for entry in table:
            if last is not None:  # asking for the next entry ends all work on the last one
                self._leave(model, last, checkpoint)
            last = entry if any(below(prefix, n) for n in entry.ours) else None
            if last is not None:
                fill_module(model, infos, [entry], checkpoint, dtype, self._arrives(unit_of(entry.ours[0])))
        if last is not None:
            self._leave(model, last, checkpoint)

    def _arrives(self, unit: str) -> torch.device:
        return torch.device("cpu") if self.plan.streamed(unit) else self.plan.device(unit)

    def _leave(self, model: Model, entry: Entry, checkpoint: Checkpoint) -> None:
        """Take the tensors of units that are streamed out of the model."""
        for name in (n for n in entry.ours if self.plan.streamed(unit_of(n))):
            tensor = stored_tensor(model, name).detach()
            on_disk = self.plan.places[unit_of(name)] == DISK
            (self.weights.write if on_disk else self.weights.keep)(name, tensor)
            set_module_tensor_to_device(model, name, "meta")
            if on_disk:
                for stored in entry.theirs:
                    checkpoint.release(stored)

    def tie(self, model: Model) -> None:
        """Give a tied head the embedding's weight where it runs: the same tensor, or a copy on another device."""
        tied = model.spec.head.tie()
        if not tied:
            return
        ours, source = f"head.{tied[0]}", f"embed.{tied[1]}"
        weight = model.get_parameter(source)
        if self.plan.streamed("head"):
            model.tie()
            set_module_tensor_to_device(model, ours, "meta")
            self.weights.alias(ours, source) if weight.is_meta else self.weights.keep(ours, weight.data)
        elif weight.is_meta or weight.device != self.plan.device("head"):
            value = self.weights[source] if weight.is_meta else weight.data
            owner, _, leaf = ours.rpartition(".")
            copy = nn.Parameter(value.to(self.plan.device("head")), requires_grad=False)
            model.get_submodule(owner).register_parameter(leaf, copy)
        else:
            model.tie()

    def new_cache(self, model: Model, rows: int) -> Any:
        """An empty cache whose layers' tokens lie where the layers run."""
        where = [self.plan.device(f"layers.{i}") for i in range(len(model.layers))]
        slots, policy = model.spec.slots(), model.spec.cache
        caches = {
            device: policy.build([s if at == device else {} for s, at in zip(slots, where, strict=True)], rows, model.dtype, device)
            for device in dict.fromkeys(where)
        }
        return next(iter(caches.values())) if len(caches) == 1 else SplitCache([caches[device] for device in where])


def prepare(module: nn.Module) -> None:
    """Lay streamed weights out as resident ones are, so that results are the same to the bit."""
    for part in module.modules():
        if isinstance(part, Prepared):
            part.prepare()


class SplitCache:
    """One cache a device, as one. of_layer: the cache of each layer; layers of one device share theirs."""

    def __init__(self, of_layer: Sequence[Any]):
        self.of_layer = list(of_layer)
        self.parts = list({id(cache): cache for cache in of_layer}.values())

    @property
    def length(self) -> list[int]:
        return self.parts[0].length

    @property
    def pending(self) -> list[int]:
        """Tokens written but not committed; after a call that failed half-way, of the devices that it reached."""
        return [max(counts) for counts in zip(*(cache.pending for cache in self.parts), strict=True)]

    def extend(self, layer: int, new: Any, step: Any, slots: Any) -> Any:
        return self.of_layer[layer].extend(layer, new, step, slots)

    def reserve(self, columns: int) -> bool:
        done = [cache.reserve(columns) for cache in self.parts]
        return all(done)

    def budget(self) -> list[int]:
        return [min(counts) for counts in zip(*(cache.budget() for cache in self.parts), strict=True)]

    def commit(self, keep: Sequence[int] | None = None) -> None:
        for cache in self.parts:
            cache.commit(keep)

    def trim(self, length: Sequence[int]) -> None:
        for cache in self.parts:
            cache.trim(length)

    def fork(self, rows: Sequence[int]) -> Self:
        new = {id(cache): cache.fork(rows) for cache in self.parts}
        return type(self)([new[id(cache)] for cache in self.of_layer])

    def bytes(self) -> int:
        return sum(cache.bytes() for cache in self.parts)

    def check(self) -> None:
        for cache in self.parts:
            cache.check()


def check_parts(model: Model, plan: Plan) -> None:
    """Raise ValueError for parts that cannot be where a plan puts them, all at once."""
    problems = []
    for unit in filter(plan.streamed, plan.places):
        for name, part in model.get_submodule(unit).named_modules(prefix=unit):
            if isinstance(part, StoredLinear) and any(part.rearranges(t) for t in part.buffers()):
                problems.append(f"{name} is packed and takes the layout of one device")
            dispatch = getattr(part, "dispatch", None)
            if isinstance(dispatch, ExpertsModule) and type(dispatch).prepare is not ExpertsModule.prepare:
                problems.append(f"{name} arranges its experts in one block; override {name}.dispatch=loop")
    devices = {plan.device(unit) for unit in plan.places}
    if type(model.head).pool is not HeadModule.pool and (len(devices) > 1 or plan.streamed("head")):
        problems.append(f"head {model.spec.head.name} pools whole rows and must lie, with all others, on one device")
    if len(devices) > 1 and model.spec.cache.name in ("shared", "offload"):
        problems.append(f"cache {model.spec.cache.name} hands tokens from layer to layer, which several GPUs cannot; override cache=dense")
    if problems:
        some = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise ValueError(
            f"device_map: {some}. Give these a place where they stay, or load packed weights as plain ones (quantized='dequantize')"
        )


def check_disk(folder: Path, need: int) -> None:
    """Raise NotEnoughMemory where a disk has less than ``need`` bytes free."""
    have = shutil.disk_usage(folder).free
    if need > have:
        raise NotEnoughMemory(f"{folder}: {need / GIB:.3f} GiB of weights go to this disk, it has {have / GIB:.3f} GiB free")
