"""Experts' weights in host memory; on the device are those used last, and those that the next layer will probably want."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zoo.components.contracts import MLP, Experts, ExpertsModule, RouterModule, Routing, StoredLinear
from zoo.components.ops.moe.sorting import weighted
from zoo.components.registry import part


@part(Experts, "offload", source="Eliseev & Mazur 2023, arXiv:2312.17238, sections 3.1 (LRU) and 3.2 (speculative loading)")
@dataclass(frozen=True, kw_only=True)
class Offload(Experts):
    """As ``loop``, to the bit, with the weights on the host and the ``resident`` experts of each layer that were used last on the device.

    prefetch: how many experts of the next layer are sent ahead, those that its router chooses most often when it is given this layer's
    input. They take the place of resident ones only when they are used. On a CPU the host is the device and only the copies remain.
    Counters: see ``traffic``. Where gradients are wanted, the experts of each call are copied anew.
    """

    resident: int = 2
    prefetch: int = 2
    exact = True

    def problems(self, experts: tuple[MLP, ...], width: int) -> Iterator[tuple[str, str]]:
        if not 1 <= self.resident <= len(experts):
            yield "resident", f"must lie in 1..{len(experts)} (experts), got {self.resident}"
        if not 0 <= self.prefetch <= len(experts):
            yield "prefetch", f"must lie in 0..{len(experts)} (experts), got {self.prefetch}"

    def build(self, experts: tuple[MLP, ...], width: int) -> ExpertsModule:
        return OffloadModule(self)


@dataclass
class Traffic:
    """Uses of experts, one for each expert that a call runs: on the device already, sent ahead, or fetched while the device waited.

    sent_ahead: experts that were prefetched, used or not. bytes_moved: from host to device, prefetched ones included.
    """

    hits: int = 0
    prefetch_hits: int = 0
    misses: int = 0
    sent_ahead: int = 0
    bytes_moved: int = 0

    @property
    def uses(self) -> int:
        return self.hits + self.prefetch_hits + self.misses

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def clear(self) -> None:
        """Begin to count anew."""
        self.__init__()


def traffic(model: nn.Module) -> dict[str, Traffic]:
    """The counters of every offloaded mixture in a model by module path; they go on counting."""
    return {path: m.traffic for path, m in model.named_modules() if isinstance(m, OffloadModule)}


class Copy(NamedTuple):
    """An expert's tensors on the device, and where on the host they came from."""

    tensors: dict[str, Tensor]
    origin: tuple[tuple[int, int], ...]


class Following(NamedTuple):
    """The next layer's mixture."""

    router: RouterModule
    dispatch: OffloadModule
    experts: nn.ModuleList


class OffloadModule(ExpertsModule):
    """resident: copies on the device, the least recently used first. ahead: copies that were sent before anyone asked."""

    def __init__(self, spec: Offload):
        super().__init__()
        self.spec, self.traffic = spec, Traffic()
        self.resident: OrderedDict[int, Copy] = OrderedDict()
        self.ahead: dict[int, Copy] = {}
        self.following: Following | None = None
        self.stream: torch.cuda.Stream | None = None

    def prepare(self, experts: nn.ModuleList) -> None:
        """Move the weights to the host, pinned where they come from a GPU. Raises ValueError for storages laid out by device."""
        self.resident.clear()
        self.ahead.clear()
        moved = [t for t in (*experts.parameters(), *experts.buffers()) if t.is_cuda]
        if moved and any(isinstance(m, StoredLinear) for m in experts.modules()):
            raise ValueError("experts offload: packed weights take the layout of the device they lie on; use dispatch=grouped for them")
        for tensor in moved:
            tensor.data = tensor.data.cpu().pin_memory()

    def precede(self, router: RouterModule, dispatch: ExpertsModule, experts: nn.ModuleList) -> None:
        self.following = Following(router, dispatch, experts) if isinstance(dispatch, OffloadModule) else None

    def forward(self, x: Tensor, routing: Routing, experts: nn.ModuleList) -> Tensor:
        likely = self.guess(x, routing)
        wanted = [number for number in routing.experts.unique().tolist() if number >= 0]
        self.await_ahead(x.device)
        done: dict[int, Tensor] = {}
        order = sorted(wanted, key=lambda n: n not in self.resident)  # those that are here, before others push them out
        for number in order:
            copy = self.obtain(number, experts[number], x.device)
            if number == order[-1] and self.following:  # behind what this layer waits for, beside what it computes
                self.following.dispatch.receive(likely, self.following.experts, x.device)
            token, choice = torch.where(routing.experts == number)
            run = partial(run_with, experts[number], copy.tensors)
            done[number] = weighted(run, x[token], routing.weights[token, choice, None], routing.on_input)
        self.ahead.clear()
        return self.summed(x, routing, done)

    def summed(self, x: Tensor, routing: Routing, done: dict[int, Tensor]) -> Tensor:
        """In the order of ``loop``, for sums of floating-point numbers depend on it."""
        out = torch.zeros(x.shape, dtype=routing.weights.dtype, device=x.device)
        for number in sorted(done):
            out = out.index_add(0, torch.where(routing.experts == number)[0], done[number])
        return out.to(x.dtype)

    # ---- the copies ----------------------------------------------------------------------------------------------------------

    def obtain(self, number: int, expert: nn.Module, device: torch.device) -> Copy:
        """The expert's copy on the device, from where it is; it is then the one that was used last."""
        if wants_gradient(expert):
            self.traffic.misses += 1
            return self.copied(expert, device)  # gradients reach the weights through a copy of this call's own
        held, sent = self.resident.pop(number, None), self.ahead.pop(number, None)
        origin = origin_of(expert)
        if held and held.origin == origin:
            self.traffic.hits += 1
        elif sent and sent.origin == origin:
            self.traffic.prefetch_hits += 1
            held = sent
        else:
            self.traffic.misses += 1
            held = self.copied(expert, device)
        while len(self.resident) >= self.spec.resident:
            self.resident.popitem(last=False)
        self.resident[number] = held
        return held

    def copied(self, expert: nn.Module, device: torch.device) -> Copy:
        tensors, graph = tensors_of(expert), wants_gradient(expert)
        self.traffic.bytes_moved += sum(t.nbytes for t in tensors.values())
        with torch.inference_mode(False):  # a copy outlives the call, which may be the only one in that mode
            copies = {n: (t if graph else t.detach()).to(device, non_blocking=True, copy=True) for n, t in tensors.items()}
        return Copy(copies, origin_of(expert))

    # ---- the next layer's ----------------------------------------------------------------------------------------------------

    def guess(self, x: Tensor, routing: Routing) -> list[int]:
        """The experts to which the next layer's router would send most tokens, were this layer's input its own."""
        following = self.following
        if following is None or not following.dispatch.spec.prefetch or any(map(wants_gradient, following.experts)):
            return []
        with settled(following.router):
            routed = following.router.forward(x, routing.valid)  # not as a call: hooks count what is routed, which this is not
        counts = Counter(number for number in routed.experts.flatten().tolist() if number >= 0)
        return [number for number, _ in counts.most_common(following.dispatch.spec.prefetch)]

    def receive(self, numbers: Sequence[int], experts: nn.ModuleList, device: torch.device) -> None:
        """Copy experts that are not resident on a stream of their own, while the device computes."""
        if device.type == "cuda" and self.stream is None:
            self.stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            for number in numbers:
                if number not in self.resident and number not in self.ahead:
                    self.ahead[number] = self.copied(experts[number], device)
                    self.traffic.sent_ahead += 1

    def await_ahead(self, device: torch.device) -> None:
        """What was sent ahead is there for the stream that computes, and stays until that is done with it."""
        if self.stream and self.ahead:
            here = torch.cuda.current_stream(device)
            here.wait_stream(self.stream)
            for copy in self.ahead.values():
                for tensor in copy.tensors.values():
                    tensor.record_stream(here)

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadModule:
        """A copy begins with nothing on the device and its counters at zero.

        It is followed by the copy of the next layer's mixture where that is copied too, which then finds a note of it in ``memo``.
        """
        memo[id(self)] = twin = OffloadModule(self.spec).train(self.training)
        awaited: Any = memo.pop(note(self), None)
        if awaited:
            before, following = awaited
            before.following = deepcopy(following, memo)
        if self.following and id(self.following.dispatch) in memo:
            twin.following = deepcopy(self.following, memo)
        elif self.following:
            memo[note(self.following.dispatch)] = twin, self.following
        return twin


def note(dispatch: OffloadModule) -> Any:
    """Where a copy that is under way says who waits for the copy of a dispatch; other keys of a memo are plain numbers."""
    return OffloadModule, id(dispatch)


@contextmanager
def settled(module: nn.Module) -> Iterator[None]:
    """Out of training, where a router may draw noise, and back into it module by module."""
    training = [m for m in module.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


def run_with(expert: nn.Module, tensors: dict[str, Tensor], rows: Tensor) -> Tensor:
    return functional_call(expert, tensors, (rows,))


def wants_gradient(expert: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in expert.parameters())


def tensors_of(expert: nn.Module) -> dict[str, Tensor]:
    return dict(expert.named_parameters()) | dict(expert.named_buffers())


def origin_of(expert: nn.Module) -> tuple[tuple[int, int], ...]:
    """Changes when the expert's tensors are replaced, moved or written to."""
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors_of(expert).values())
