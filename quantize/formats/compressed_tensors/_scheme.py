"""What a scheme is: one of the layouts that compressed-tensors calls formats, for one linear module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.spec import TensorInfo
from zoo.formats import member

Group = Mapping[str, Any]  # an entry of config_groups: targets, format, weights, input_activations, output_activations
Allowed = Mapping[str, tuple[Any, ...]]  # field -> the values that are understood
GROUPED = ("group", "tensor_group")  # strategies


class Scheme(ABC):
    """formats: the words of ``format`` that it answers to."""

    formats: tuple[str, ...]

    @abstractmethod
    def storage(self, group: Group, place: str, tensors: Mapping[str, TensorInfo]) -> Linear:
        """The storage that a group describes. place: of the group, for messages. Raises ValueError, naming each field, for others."""

    @abstractmethod
    def holds(self, storage: Linear) -> bool:
        """Whether a storage's weights are of this scheme."""

    @abstractmethod
    def refuses(self, storage: Linear) -> list[str]:
        """Reasons why a storage whose weights are of this scheme cannot be written all the same."""

    @abstractmethod
    def group(self, storage: Linear) -> dict[str, Any]:
        """``format``, ``weights`` and ``input_activations`` of the group for a storage."""

    @abstractmethod
    def disk_names(self, storage: Linear, bias: bool) -> list[str]: ...

    @abstractmethod
    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]: ...

    @abstractmethod
    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]: ...


def arguments(group: Group, name: str, place: str) -> dict[str, Any]:
    """A group's ``weights`` or ``input_activations``, its strategy, where that is left out, inferred as the library does."""
    found = dict(member(group, name, Mapping, {}, place))
    size = found.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    return found | ({} if found.get("strategy") is not None else {"strategy": inferred})


def wrong(data: Mapping[str, Any], allowed: Allowed, name: str) -> Iterator[str]:
    """A reason for each field of ``data`` (called ``name`` in its group) that has a value which is not understood."""
    for field, values in allowed.items():
        value = data.get(field)
        if (type(value), value) not in [(type(v), v) for v in values]:  # True is not 1
            said = " is missing" if value is None else f": {value!r:.60} is not supported"
            yield f"{name}.{field}{said}; supported: {', '.join(str(v) for v in values if v is not None)}"
    size: Any = data.get("group_size")
    whole = type(size) is int
    if data.get("strategy") in GROUPED and not (whole and size > 0):
        yield f"{name}.group_size: a positive number is needed, got {size!r:.60}"
    if data.get("strategy") not in GROUPED and size is not None and not (whole and size in (0, -1)):
        yield f"{name}.group_size: {size!r:.60} is for the strategies {' and '.join(GROUPED)}, not for {data.get('strategy')!r:.60}"


def raise_for(place: str, reasons: Iterator[str]) -> None:
    """Raise ValueError with all reasons, each with its place, if there are any."""
    problems = [f"{place}.{reason}" for reason in dict.fromkeys(reasons)]
    if problems:
        raise ValueError("; ".join(problems))
