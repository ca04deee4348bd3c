"""A checkpoint seen through another one, which says what differs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zoo.checkpoint import Checkpoint
from zoo.components.spec import TensorInfo


class Wrapped(Checkpoint):
    """``inner`` as it is; kinds derive from it and override what they change."""

    def __init__(self, inner: Checkpoint):
        self.inner, self.reference, self.config, self.dtype = inner, inner.reference, inner.config, inner.dtype

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.inner.tensors()

    @property
    def private(self) -> bool:
        return self.inner.private

    def read(self, name: str) -> Tensor:
        return self.inner.read(name)

    def holds(self, tensor: Tensor) -> bool:
        return self.inner.holds(tensor)

    def release(self, name: str) -> None:
        self.inner.release(name)

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
