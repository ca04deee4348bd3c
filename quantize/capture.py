"""What passes between the modules of a layer, caught while calibration data runs through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.components.contracts import ExpertsModule, Routing
from zoo.quantize.stats.channels import ChannelSizes
from zoo.quantize.stats.hessian import Hessian


class _Enough(Exception):
    """Ends a pass whose rest is not needed."""


class _Catcher:
    """The hooks' state. ``first_only``: only the input that is used first, and the modules that share it, are watched."""

    def __init__(self, modules: Iterable[str], first_only: bool):
        self.modules, self.first_only = set(modules), first_only
        self.hessians: dict[str, Hessian] = {}
        self.seen: list[tuple[Tensor, Hessian]] = []  # inputs of the pass under way; held, so that an address is not reused
        self.calls: list[list[str]] = []  # of each pass

    def run(self, forward: Callable[[], Any]) -> None:
        """One pass."""
        self.seen.clear()
        self.calls.append([])
        with suppress(_Enough):
            forward()

    def catch(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """The hook itself, once ``name`` is bound."""
        x = args[0]
        shared = next((hessian for tensor, hessian in self.seen if tensor is x), None)
        if shared is None:
            if self.first_only and self.hessians and name not in self.hessians:
                return
            shared = self.hessians.get(name) or Hessian(x.shape[-1], device=x.device)
            shared.update(x)
            self.seen.append((x, shared))
        self.hessians[name] = shared
        self.calls[-1].append(name)
        if self._complete():
            raise _Enough

    def _complete(self) -> bool:
        """Whether the pass has shown all that the first one did, and no module may follow that the first one did not call."""
        first, now = self.calls[0], self.calls[-1]
        if len(self.calls) == 1 or len(now) != len(first) or sorted(now) != sorted(first):
            return False
        return self.first_only or set(now) == self.modules


def second_moments(modules: Mapping[str, nn.Module], passes: Iterable[Callable[[], Any]], first_only: bool = False) -> dict[str, Hessian]:
    """Run the passes and gather the modules' inputs. Modules that are given the same tensor (q, k and v) share one Hessian.

    first_only: watch only the modules that share the first input. Modules that were never called are left out. A pass ends at the
    last input that is watched; what would follow is not computed. Raises ValueError for inputs that hold NaN or infinity.
    """
    catcher = _Catcher(modules, first_only)
    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(partial(catcher.catch, name)).remove)
        for forward in passes:
            catcher.run(forward)
    check_finite(catcher.hessians)
    return catcher.hessians


def channel_sizes(inputs: Mapping[str, nn.Module], outputs: Mapping[str, nn.Module],
                  passes: Iterable[Callable[[], Any]]) -> dict[str, ChannelSizes]:  # fmt: skip
    """Run the passes and gather the sizes of some modules' inputs and of others' outputs, by name. Modules never called are left out.

    Raises ValueError for activations that hold NaN or infinity.
    """
    found: dict[str, ChannelSizes] = {}

    def see(name: str, x: Tensor) -> None:
        found.setdefault(name, ChannelSizes(x.shape[-1], x.device)).update(x)

    def see_input(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        see(name, args[0])

    def see_output(name: str, _: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        see(name, y)

    with ExitStack() as stack:
        for name, module in inputs.items():
            stack.callback(module.register_forward_pre_hook(partial(see_input, name)).remove)
        for name, module in outputs.items():
            stack.callback(module.register_forward_hook(partial(see_output, name)).remove)
        for forward in passes:
            forward()
    check_finite(found)
    return found


def check_finite(found: Mapping[str, Hessian | ChannelSizes]) -> None:
    """Raise ValueError, naming the first place, for statistics of activations that hold NaN or infinity."""
    for name, statistic in found.items():
        if not statistic.finite:
            raise ValueError(
                f"{name}: activations hold NaN, infinity or numbers too large to be squared here, and nowhere before, on the calibration "
                "data; load the model in a wider dtype (bfloat16 or float32), or look for damaged weights before it"
            )


def calls(module: nn.Module, passes: Iterable[Callable[[], Any]]) -> list[tuple[Any, ...]]:
    """The arguments that a module is called with, one call a pass; what follows the call is not computed."""
    seen: list[tuple[Any, ...]] = []

    def catch(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args)
        raise _Enough

    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(catch).remove)
        for forward in passes:
            with suppress(_Enough):
                forward()
    return seen


@contextmanager
def every_expert(module: nn.Module) -> Iterator[None]:
    """Within this, every expert of the mixtures in a module runs on every token. Outputs stay: what no token chose counts with weight 0."""

    def widen(_: nn.Module, args: tuple[Tensor, Routing, nn.ModuleList]) -> tuple[Tensor, Routing, nn.ModuleList]:
        x, routing, experts = args
        chosen = routing.experts >= 0
        weights = torch.zeros_like(routing.logits, dtype=routing.weights.dtype)
        weights.scatter_add_(1, routing.experts.clamp(min=0), routing.weights * chosen)
        everyone = torch.arange(routing.count, device=x.device).expand_as(weights)
        return x, routing._replace(weights=weights, experts=everyone, whole=True), experts

    with ExitStack() as stack:
        for dispatch in (m for m in module.modules() if isinstance(m, ExpertsModule)):
            stack.callback(dispatch.register_forward_pre_hook(widen).remove)
        yield
