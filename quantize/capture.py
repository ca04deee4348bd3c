"""Second moments of module inputs, caught while calibration data passes through a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from zoo.quantize.stats.hessian import Hessian


class _Catcher:
    """The hooks' state. ``first_only``: only the input that is used first, and the modules that share it, are watched."""

    def __init__(self, first_only: bool):
        self.first_only = first_only
        self.hessians: dict[str, Hessian] = {}
        self.seen: list[tuple[Tensor, Hessian]] = []  # inputs of the pass under way; held, so that an address is not reused

    def catch(self, name: str, x: Tensor) -> None:
        shared = next((hessian for tensor, hessian in self.seen if tensor is x), None)
        if shared is None:
            if self.first_only and self.hessians and name not in self.hessians:
                return
            shared = self.hessians.get(name) or Hessian(x.shape[-1], device=x.device)
            shared.update(x)
            self.seen.append((x, shared))
        self.hessians[name] = shared


def second_moments(modules: Mapping[str, nn.Module], passes: Iterable[Callable[[], Any]], first_only: bool = False) -> dict[str, Hessian]:
    """Run the passes and gather the modules' inputs. Modules that are given the same tensor (q, k and v) share one Hessian.

    first_only: watch only the modules that share the first input. Modules that were never called are left out.
    """
    catcher = _Catcher(first_only)
    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(lambda _, args, name=name: catcher.catch(name, args[0]))
            stack.callback(handle.remove)
        for run in passes:
            catcher.seen.clear()
            run()
    return catcher.hessians
