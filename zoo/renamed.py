"""A checkpoint under other tensor names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zoo.checkpoint import Checkpoint, CheckpointError
from zoo.components.spec import TensorInfo
from zoo.wrapped import Wrapped


class Renamed(Wrapped):
    """``inner`` with each tensor under the name that ``names`` (name in the files -> new name) gives it.

    Raises CheckpointError where two tensors get one name.
    """

    def __init__(self, inner: Checkpoint, names: Mapping[str, str]):
        super().__init__(inner)
        self._there = {new: old for old, new in names.items()}
        twice = sorted(old for old, new in names.items() if self._there[new] != old)
        if twice:
            pairs = ", ".join(f"{old} and {self._there[names[old]]}" for old in twice)
            raise CheckpointError(f"{self.reference}: two names of one tensor are in the files: {pairs}; remove one of each")

    def tensors(self) -> Mapping[str, TensorInfo]:
        infos = self.inner.tensors()
        return {new: infos[old] for new, old in self._there.items()}

    def read(self, name: str) -> Tensor:
        return self.inner.read(self._there[name])

    def release(self, name: str) -> None:
        self.inner.release(self._there[name])
