"""Second moments of module inputs, caught while calibration data passes through a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

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
    last input that is watched; what would follow is not computed.
    """
    catcher = _Catcher(modules, first_only)
    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(partial(catcher.catch, name)).remove)
        for forward in passes:
            catcher.run(forward)
    return catcher.hessians
