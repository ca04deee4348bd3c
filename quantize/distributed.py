"""Several processes that quantize one model together, as torchrun starts them.

Every process holds the model. Each runs its share of the calibration windows (every n-th) and rounds its share of a layer's modules;
statistics are summed over the processes and results handed to all, so that all hold the same bits at the end. The first process alone
writes files and shows progress. Sums of floats are made in another order than by one process: statistics differ in their last bits.

A process that fails tells the others, see ``zoo.quantize.conversation``, and they look up from whatever they wait for, be it words or
the other half of an exchange of tensors. So no process waits for one that failed: all end with its message.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from zoo.quantize.conversation import PATIENCE, Conversation, Failed, Lost

FIRST = 0
GLANCE = 0.0005  # seconds between looks at whether an exchange of tensors is done
MARK = "processes.tmp"  # in a folder, to tell whether it is one for all processes
FORESEEN = (ValueError, OSError, MemoryError)  # whose messages stand for themselves

T = TypeVar("T")
Reduce = Callable[[Tensor], Tensor]


class Statistic(Protocol):
    """What is gathered of a module's inputs or outputs, of ``width`` channels."""

    tokens: int

    @property
    def width(self) -> int: ...

    def pooled(self, tokens: int, total: Reduce, most: Reduce) -> Self: ...


S = TypeVar("S", bound=Statistic)


class Processes:
    """One process, to which all work falls: nothing is exchanged. ``Together`` is the same for several.

    rank: of this process, of ``size``. here: how many run on this machine and share its memory.
    """

    rank, size, here = FIRST, 1, 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and shows progress."""
        return self.rank == FIRST

    def mine(self, windows: Tensor) -> Tensor:
        """This process's share of windows [samples, ..]."""
        return windows[self.rank :: self.size].contiguous()

    def count(self, windows: int) -> int:
        """How many of the first so many windows are this process's."""
        return len(range(self.rank, windows, self.size))

    def share(self, costs: Mapping[str, float]) -> list[str]:
        """The names that fall to this process when costs are balanced, in the order given: the dearest first to the least laden."""
        load, owner = [0.0] * self.size, {}
        for name in sorted(costs, key=lambda name: -costs[name]):
            owner[name] = load.index(min(load))
            load[owner[name]] += costs[name]
        return [name for name in costs if owner[name] == self.rank]

    def check_windows(self, windows: int) -> None:
        """Raise ValueError where a process would have no window."""
        if windows < self.size:
            raise ValueError(f"{windows} calibration windows are too few for {self.size} processes; give more samples, or start fewer")

    def check_folder(self, folder: Path) -> None:
        """Raise ValueError where a folder, in which nobody else writes, is not the same one for all processes."""

    def exchange(self, value: T) -> list[T]:
        """What each process gives, in their order. Raises Failed where one has failed."""
        return [value]

    def decided(self, decide: Callable[[], T]) -> T:
        """What the first process comes to; the others do not try."""
        return decide()

    def in_turn(self, act: Callable[[], T]) -> T:
        """Let the first process act, and then the others."""
        return act()

    def check_same(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Raise ValueError, naming what differs, where processes were not given the same. describe: plain data."""

    def mean(self, total: float, count: int) -> float:
        """The mean over all processes of what sums up to ``total`` over ``count`` numbers in this one."""
        return total / count

    def pooled(self, found: dict[str, S], kind: Callable[..., S], device: torch.device) -> dict[str, S]:
        """The statistics of all processes' windows, by name; names of the same statistic share one. found is emptied.

        kind: called with the width and ``device`` for what only other processes have seen.
        """
        del kind, device
        return found

    def whole(self, windows: Tensor, room: Callable[[Tensor, int], Tensor]) -> Tensor:
        """The windows of all processes in their order, on the first, and no windows elsewhere. room(like, samples) makes their place."""
        del room
        return windows

    def of_first(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors, of the same shapes in all processes, the first one's values, in place."""

    def of_others(self, own: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> dict[str, dict[str, Tensor]]:
        """Hand named sets of tensors, by a path each, to all processes; returns those of the others, on ``device``."""
        del own, device
        return {}


class Together(Processes):
    """The processes of torch.distributed's default group. Leave it, as a context, with an error, and all others fail with it.

    Tensors on the CPU go through a group of its own, and those on GPUs through the default group, whose backend knows them.
    """

    def __enter__(self) -> Self:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._spoken, self._tensors = _cpu_group(), _cpu_group()
        hosts: list[Any] = [None] * self.size
        dist.all_gather_object(hosts, socket.gethostname(), group=self._spoken)
        self.here = hosts.count(socket.gethostname())
        self._words = Conversation(self._spoken, self.size)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._words.exchange(None, last=True)
            else:
                self._words.fail(described(error))
        finally:
            self._words.close()
            if error is not None:
                self._tensors.abort()  # others may be in the middle of an exchange
            for group in (self._spoken, self._tensors):
                dist.destroy_process_group(group)

    def exchange(self, value: T) -> list[T]:
        return self._words.exchange(value)

    def decided(self, decide: Callable[[], T]) -> T:
        given: list[Any] = self.exchange(decide() if self.first else None)
        return given[FIRST]

    def in_turn(self, act: Callable[[], T]) -> T:
        if self.first:
            done = act()
            self.exchange(None)
            return done
        self.exchange(None)
        return act()

    def check_same(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        described = self.exchange(dict(describe()))
        differ = sorted({key for one in described for key in one if one[key] != described[FIRST][key]})
        if differ:
            raise ValueError(f"the processes differ in {', '.join(differ)}; give all of them the same model and settings")

    def check_folder(self, folder: Path) -> None:
        mark = folder / MARK
        word = self.decided(lambda: _marked(mark))
        strangers = [str(rank) for rank, seen in enumerate(self.exchange(_content(mark) == word)) if not seen]
        if self.first:
            mark.unlink()
        if strangers:
            raise ValueError(f"{folder} is not one folder for all: process {', '.join(strangers)} does not find there what process {FIRST} "
                             "wrote; name a folder on a disk that all machines share")  # fmt: skip

    def mean(self, total: float, count: int) -> float:
        totals, counts = zip(*self.exchange((total, count)), strict=True)
        return sum(totals) / sum(counts)

    def pooled(self, found: dict[str, S], kind: Callable[..., S], device: torch.device) -> dict[str, S]:
        numbers = {id(statistic): number for number, statistic in enumerate(found.values())}
        seen = self.exchange({name: (numbers[id(s)], s.tokens, s.width) for name, s in found.items()})
        sharing: dict[tuple[int | None, ...], list[str]] = {}
        for name in dict.fromkeys(name for one in seen for name in one):
            sharing.setdefault(tuple(one[name][0] if name in one else None for one in seen), []).append(name)
        result = {}
        for names in sharing.values():
            shown = [one[names[0]] for one in seen if names[0] in one]
            own = found[names[0]] if names[0] in found else kind(shown[0][2], device=device)
            result |= dict.fromkeys(names, own.pooled(sum(tokens for _, tokens, _ in shown), self._total, self._most))
            for name in names:
                found.pop(name, None)  # before the next one, so that two sets never lie in memory
        return result

    def whole(self, windows: Tensor, room: Callable[[Tensor, int], Tensor]) -> Tensor:
        samples = sum(self.exchange(len(windows)))
        if not samples:
            return windows
        result = room(windows, samples) if self.first else windows[:0]
        spare = torch.empty_like(windows[0])  # of processes that have a window less, in the last row
        for number, start in enumerate(range(0, samples, self.size)):
            own = windows[number] if number < len(windows) else spare
            row = [*result[start : start + self.size], *[spare] * (start + self.size - samples)] if self.first else None
            self._done(dist.gather(_bytes(own), row and [_bytes(t) for t in row], FIRST, group=self._tensors, async_op=True))
        return result

    def of_first(self, tensors: Iterable[Tensor]) -> None:
        self.exchange(None)  # so that nobody waits long for the others
        for tensor in tensors:
            sent = tensor.contiguous()
            self._done(dist.broadcast(_bytes(sent), FIRST, group=self._group(sent), async_op=True))
            if sent is not tensor:
                tensor.copy_(sent)

    def of_others(self, own: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> dict[str, dict[str, Tensor]]:
        layouts = self.exchange({path: {n: (t.shape, t.dtype) for n, t in tensors.items()} for path, tensors in own.items()})
        found = {}
        for owner, layout in enumerate(layouts):
            size = sum(shape.numel() * dtype.itemsize for tensors in layout.values() for shape, dtype in tensors.values())
            packed = torch.empty(size, dtype=torch.uint8, device=device)
            if owner == self.rank and own:
                torch.cat([_bytes(t.to(device)) for tensors in own.values() for t in tensors.values()], out=packed)
            self._done(dist.broadcast(packed, owner, group=self._group(packed), async_op=True))
            if owner != self.rank:
                found |= _unpacked(packed, layout)
        return found

    def _total(self, tensor: Tensor) -> Tensor:
        self._done(dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self._group(tensor), async_op=True))
        return tensor

    def _most(self, tensor: Tensor) -> Tensor:
        self._done(dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group(tensor), async_op=True))
        return tensor

    def _done(self, work: dist.Work | None) -> None:
        """Wait for an exchange of tensors. Raises Failed as soon as another process is known to have failed, for it will not come."""
        assert work is not None  # of a group that this process is a member of
        while not work.is_completed():
            self._words.check()
            time.sleep(GLANCE)
        try:
            work.wait()
        except RuntimeError as e:
            self._words.check()
            raise Lost(f"an exchange of tensors with the other processes was cut short: {e}") from e

    def _group(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._tensors if tensor.device.type == "cpu" else None


def joined() -> Processes:
    """The processes of torch.distributed's default group, or this one alone where there is none."""
    return Together() if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else Processes()


@dataclass(frozen=True)
class Launched:
    """device: of this process. first: whether it is the one that writes files and shows progress."""

    device: str
    first: bool


@contextmanager
def launched(device: str) -> Iterator[Launched]:
    """Within this, the processes that torchrun started are torch.distributed's default group, where it started any.

    device: ``cpu``, or ``cuda``, of which each process takes its own. Raises ValueError for a GPU by number, and for too few GPUs.
    What goes wrong is raised in one process, for one message on the terminal; the others end with SystemExit.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched():
        yield Launched(device, True)
        return
    store, rank, size = next(iter(rendezvous("env://")))
    with _said_once(store):
        gpu = _own_gpu(device) if torch.device(device).type == "cuda" else None
        dist.init_process_group("gloo" if gpu is None else "nccl", store=store, rank=rank, world_size=size)
        try:
            yield Launched(device if gpu is None else str(gpu), rank == FIRST)
        finally:
            dist.destroy_process_group()


@contextmanager
def _said_once(store: Store) -> Iterator[None]:
    """Let one of the processes with the same error raise it, and none that only followed another; those end quietly."""
    try:
        yield
    except Exception as e:
        follows = isinstance(e, Failed) and not isinstance(e, Lost)
        if follows or _is_said(store, described(e)):
            raise SystemExit(2) from e
        raise


def _is_said(store: Store, message: str) -> bool:
    """Whether another process was the first to ask this; False where what counts is gone with its process."""
    try:
        return store.add(f"said/{message}", 1) > 1
    except dist.DistError:
        return False


def _own_gpu(device: str) -> torch.device:
    local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if torch.device(device).index is not None:
        raise ValueError(f"device {device}: each process takes the GPU of its own number; give cuda")
    if local >= there:
        raise ValueError(f"process {local} of this machine has no GPU, there are {there}; start one process for each")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def described(error: BaseException) -> str:
    """An error in words; by its kind too where nobody foresaw it."""
    return str(error) if isinstance(error, FORESEEN) else f"{type(error).__name__}: {error}"


def _cpu_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(group, dist.ProcessGroup)  # of which every process is a member
    return group


def _marked(mark: Path) -> str:
    """Write a word that is nowhere else."""
    word = uuid.uuid4().hex
    mark.write_text(word)
    return word


def _content(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8, of the same memory where the tensor is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _unpacked(packed: Tensor, layout: Mapping[str, Mapping[str, tuple[torch.Size, torch.dtype]]]) -> dict[str, dict[str, Tensor]]:
    flat = [(path, name, shape, dtype) for path, tensors in layout.items() for name, (shape, dtype) in tensors.items()]
    runs = packed.split([shape.numel() * dtype.itemsize for _, _, shape, dtype in flat])
    found: dict[str, dict[str, Tensor]] = {path: {} for path in layout}
    for (path, name, shape, dtype), run in zip(flat, runs, strict=True):
        found[path][name] = run.clone().view(dtype).view(shape)  # a copy, since views must begin at whole numbers
    return found
