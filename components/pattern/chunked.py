"""Separate chunks of the row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import Pattern
from zoo.components.registry import part


@part(Pattern, "chunked", source="Llama 4 (attention_chunk_size), as in transformers chunked_overlay", example={"size": 4})
@dataclass(frozen=True, kw_only=True)
class Chunked(Pattern):
    """The row is cut into chunks of ``size`` positions; a token sees itself and the earlier tokens of its chunk."""

    size: int
    causal = True

    @property
    def window(self) -> int:
        return self.size

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.size < 1:
            yield "size", f"a chunk holds at least one token, got {self.size}"

    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        return (kpos <= qpos) & (kpos // self.size == qpos // self.size)
