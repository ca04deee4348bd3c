"""A checkpoint under other tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zoo.checkpoint import Checkpoint, CheckpointError
from zoo.components.spec import TensorInfo


class Renamed(Checkpoint):
    """``inner`` with each tensor under the name that ``names`` (name in the files -> new name) gives it.

    Raises CheckpointError where two tensors get one name.
    """

    def __init__(self, inner: Checkpoint, names: Mapping[str, str]):
        self.inner, self.reference, self.config, self.dtype = inner, inner.reference, inner.config, inner.dtype
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

    @property
    def tokenizer(self) -> Any:
        return self.inner.tokenizer

    @property
    def generation(self) -> dict[str, Any]:
        return self.inner.generation

    @property
    def preprocessing(self) -> dict[str, Any]:
        return self.inner.preprocessing

    @property
    def files(self) -> list[Path]:
        return self.inner.files
