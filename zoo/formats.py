"""The contract of on-disk formats of quantized weights; the formats themselves are parts of the family ``format``.

A format works on one linear module at a time: the tensors under one name on disk against those of our storage part. It knows
nothing of models. ``zoo.load`` and ``zoo.save`` ask the registry for the format that a config names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import regex  # unlike re, it can be told to give up
import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.spec import Spec, TensorInfo

T = TypeVar("T")
SECONDS = 0.25  # for one expression of a stranger's file on one name; honest ones take microseconds
JSON = {Mapping: "an object", list: "a list", str: "a string", bool: "true or false", int: "a whole number"}


@dataclass(frozen=True, kw_only=True)
class Format(Spec):
    """How quantized linear modules lie on disk.

    method: the ``quant_method`` word of ``config.json["quantization_config"]`` that this format answers to. own: only zoo reads it.
    together: whether it holds nothing but weights that a family keeps in one tensor with others (``Rule.rows``): then a module's name is
    that of this tensor, each of the format's tensors has the rows of all its modules, and biases stay plain. joint: what stands between
    a module's name and those of its tensors.
    """

    family: ClassVar[str] = "format"
    method: ClassVar[str] = ""
    own: ClassVar[bool] = False
    together: ClassVar[bool] = False
    joint: ClassVar[str] = "."

    def answers(self, config: Mapping[str, Any]) -> bool:
        """Whether a quantization_config is one of this format; several formats may share a ``quant_method``."""
        return config.get("quant_method") == self.method

    @abstractmethod
    def storage(self, config: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> Linear | None:
        """The storage part of one linear module, None where it is not quantized.

        config: the quantization_config. module: its name on disk (``model.layers.0.mlp.down_proj``). tensors: what is on disk below
        that name. Raises ValueError, naming the field, for schemes that this format or our storage parts cannot hold.
        """

    @abstractmethod
    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        """Names of the module's tensors on disk, below the module's name."""

    @abstractmethod
    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        """Tensors on disk (keyed by disk_names) -> tensors of our module (keyed as its state dict).

        Raises ValueError for shapes, dtypes and values that do not fit, see ``check_values``.
        """

    @abstractmethod
    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        """The inverse of decode, to the bit."""

    @abstractmethod
    def accepts(self, storage: Linear) -> list[str]:
        """Reasons why a storage part cannot be written in this format; empty means that it can."""

    @abstractmethod
    def config(self, storages: Mapping[str, Linear]) -> dict[str, Any]:
        """The quantization_config for a model whose linear modules (by disk name, all of them) have these storages."""


def check_shapes(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], *, floats: Sequence[str] = ("scales",)) -> None:
    """Raise ValueError for a tensor on disk of another shape, for one of ``floats`` that is none, and for another that is not int32."""
    check_floats(floats, tensors)
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            given = list(tensors[name].shape)
            raise ValueError(f"{name} is {given}, it must be {list(shape)}; quantization_config says how many bits and groups there are")
        if name not in floats and tensors[name].dtype != torch.int32:
            raise ValueError(f"{name} is {str(tensors[name].dtype).removeprefix('torch.')}, it must be int32")


def check_floats(names: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a scale on disk, of those that are there, that is no floating-point number of 16 bits or more."""
    for name in (n for n in names if n in tensors):
        if not tensors[name].is_floating_point() or tensors[name].itemsize == 1:
            raise ValueError(f"{name} is {str(tensors[name].dtype).removeprefix('torch.')}, it must be floating-point of 16 bits or more")


def check_values(storage: Linear, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Raise ValueError for values that no weight of a storage can have. tensors: as our module names them. names: theirs, on disk."""
    faults = [f"{names.get(name, name)} {reason}" for name, reason in storage.faults(tensors)]
    if faults:
        raise ValueError(f"{'; '.join(faults)}; the file is damaged: download it again, or quantize the model anew")


def check_tensors(infos: Mapping[str, TensorInfo], tensors: Mapping[str, Tensor], what: str) -> None:
    """Raise ValueError for a tensor on disk of another shape or dtype than a storage's. what: it is that has those shapes, in words."""
    for name, info in infos.items():
        given = tensors[name]
        if given.shape != info.shape:
            raise ValueError(f"{name} is {list(given.shape)}, {what} has {list(info.shape)}")
        if info.dtype and given.dtype != getattr(torch, info.dtype):
            raise ValueError(f"{name} is {str(given.dtype).removeprefix('torch.')}, it must be {info.dtype}")


def expression(pattern: str, module: str, place: str) -> bool:
    """Whether a stranger's regular expression matches a module's name from its start. Raises ValueError for one that is none, or slow."""
    try:
        return regex.match(pattern, module, timeout=SECONDS) is not None
    except TimeoutError:
        slow = f"takes more than {SECONDS} seconds to match {module}"
        raise ValueError(f"{place}: an expression ({pattern!r:.60}) {slow}; write a simpler one") from None
    except regex.error as e:
        raise ValueError(f"{place}: {pattern!r:.60} is no regular expression ({e})") from None


def member(data: Mapping[str, Any], name: str, kind: type[T], default: T, place: str) -> T:
    """A field of a config, ``default`` where it is absent or null. Raises ValueError, naming the field, where it is of another kind."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ValueError(f"{place}.{name} must be {JSON[kind]}, it is a {type(value).__name__} ({value!r:.60})")
    return value


def words(data: Mapping[str, Any], name: str, place: str) -> list[str]:
    """A field that is a list of strings, empty where it is absent or null. Raises ValueError naming the first item that is none."""
    found = member(data, name, list, [], place)
    for i, item in enumerate(found):
        if not isinstance(item, str):
            raise ValueError(f"{place}.{name}.{i} must be a string, it is a {type(item).__name__} ({item!r:.60})")
    return found
