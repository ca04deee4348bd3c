"""The families that hold weights of their own and nothing else: linear storage and norms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo.components.contracts._declare import declare
from zoo.components.cost import Call
from zoo.components.spec import Child, Spec


@dataclass(frozen=True, kw_only=True)
class Linear(Spec):
    """Storage and product of a weight matrix. Built with (inputs, outputs, bias); the module maps [..., inputs] to [..., outputs].

    The module has ``inputs`` and ``outputs``, ``dense_weight(dtype) -> [outputs, inputs]`` and ``bias`` (Parameter or None).
    """

    family: ClassVar[str] = declare("linear", "how a weight matrix is stored and multiplied")

    def flops(self, call: Call, inputs: int, outputs: int, bias: bool) -> float:
        return 2 * inputs * outputs * call.new

    def faults(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        """Those of its own tensors, in the right shapes and dtypes, whose values no weight can have, each with the reason.

        Weights and scales that are NaN or infinite are no faults here: of these a loaded model warns, see ``StoredLinear.numbers``.
        """
        yield from ()

    @abstractmethod
    def build(self, inputs: int, outputs: int, bias: bool) -> nn.Module: ...


class Prepared(nn.Module):
    """A module that arranges its tensors in memory once they are in place."""

    def prepare(self) -> None:
        """Take the layout that is fastest on the device."""
        raise NotImplementedError

    def rearranges(self, tensor: Tensor) -> bool:
        """Whether ``prepare`` may give a tensor of this module, or of one inside it, another layout."""
        return True


class StoredLinear(Prepared):
    """A linear module whose tensors in memory may differ from those that are saved."""

    inputs: int
    outputs: int
    bias: nn.Parameter | None

    def canonical(self) -> dict[str, Tensor]:
        """The tensors as they are saved, named as by the spec's ``own_tensors``."""
        raise NotImplementedError

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [outputs, inputs], by default in the dtype that holds it best."""
        raise NotImplementedError

    def hold(self, canonical: dict[str, Tensor]) -> None:
        """Take these tensors, named as they are saved and without the bias, in place of those held."""
        raise NotImplementedError

    def numbers(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of those that are saved, or a part of it, in the dtype of what its elements stand for, where that has NaN or infinity.

        It is the tensor itself for floats, and for integers, each of which is a number.
        """
        return tensor


@dataclass(frozen=True, kw_only=True)
class Norm(Spec):
    """Normalisation. Built with (width); the module maps [..., width] to the same shape."""

    family: ClassVar[str] = declare("norm", "how activations are normalised")

    def together(self, width: int) -> int:
        """Channels of a run that shares statistics. Within a run channels may change places, with their entries in the norm's tensors."""
        return width

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...


@contextmanager
def unfilled() -> Iterator[None]:
    """Modules built in here lie on the meta device, without first values: weights are to be put in their place.

    Drawing them there costs no memory, but torch draws some by way of its compiler, which takes seconds to import.
    """
    with torch.device("meta"), _NoFirstValues():
        yield


class _NoFirstValues(TorchFunctionMode):
    """Passes over the calls of torch.nn.init."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def attach(module: nn.Module, children: Mapping[str, Child]) -> None:
    """Build each child and make it a submodule under its name."""
    for name, child in children.items():
        setattr(module, name, child.build())
