"""A causal sliding window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zoo.components.contracts import Pattern
from zoo.components.registry import part


@part(
    Pattern, "window", source="Beltagy et al. 2020, arXiv:2004.05150; Jiang et al. 2023, arXiv:2310.06825, section 2", example={"size": 4}
)
@dataclass(frozen=True, kw_only=True)
class Window(Pattern):
    """A token sees itself and the ``size - 1`` tokens before it, as Hugging Face counts ``sliding_window``."""

    size: int
    causal = True
    whole = True

    @property
    def window(self) -> int:
        return self.size

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.size < 1:
            yield "size", f"a window holds at least the token itself, got {self.size}"

    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        return (kpos <= qpos) & (qpos - kpos < self.size)
