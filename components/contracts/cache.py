"""What is kept of past tokens: the layer's side of a cache, and the family of policies that make one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from zoo.components.contracts._declare import declare
from zoo.components.contracts.attention import Ask, Pattern, View
from zoo.components.contracts.step import Slot, Step
from zoo.components.cost import Call
from zoo.components.spec import Spec


class Cache(Protocol):
    """The layer side of every cache. The engine side (commit, trim, fork, bytes, check) is in ``cache/_ledger.py``."""

    def extend(self, layer: int, new: Mapping[str, Tensor], step: Step, slots: Mapping[str, Slot]) -> View:
        """Store the new tokens' slots ([B, T, *shape] each) and show the layer everything that it may look at."""
        ...


class NoCache:
    """Nothing is kept: a layer sees exactly the tokens of this call, states start at zero."""

    def extend(self, layer: int, new: Mapping[str, Tensor], step: Step, slots: Mapping[str, Slot]) -> View:
        rows = step.pos.shape[0]
        like = next(iter(new.values()))
        state = {n: like.new_zeros((rows, *s.shape), dtype=s.dtype or torch.float32) for n, s in slots.items() if s.kind == "state"}
        return View(dict(new), step.pos, state, aligned=step.start == 0, ksegment=step.segment)


@dataclass(frozen=True, kw_only=True)
class CachePolicy(Spec):
    """What is kept of past tokens. Built with (slots per layer, rows, dtype, device); see components/cache/_ledger.py.

    What a policy promises: exact, the same numbers as without a cache. chunk_invariant, any way of cutting what follows the first
    call into calls that respect ``budget()`` gives the same numbers. rollback, tokens that ``commit`` does not keep leave no trace.
    graph_safe, a call of one token a row changes no shape and asks the device nothing. forgets, some tokens are not kept.
    """

    family: ClassVar[str] = declare("cache", "what is kept of past tokens")
    exact: ClassVar[bool] = True
    chunk_invariant: ClassVar[bool] = True
    rollback: ClassVar[bool] = True
    graph_safe: ClassVar[bool] = False
    forgets: ClassVar[bool] = False

    @abstractmethod
    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> Any: ...

    def refuses(self, ask: Ask) -> list[str]:
        """Reasons why this policy cannot serve a layer; empty means that it can."""
        return ["forgets tokens, which the layer's kernel counts by their number in the row"] if self.forgets and ask.whole_rows else []

    @property
    def transparent(self) -> bool:
        """The model computes with it what it computes without any cache, so it is no part of what the model is."""
        return self.exact and type(self).without is CachePolicy.without

    def without(self) -> Cache:
        """What stands in for a cache in a call that keeps nothing."""
        return NoCache()

    def kept(self, tokens: int, slots: Mapping[str, Slot]) -> int:
        """How many of a row's ``tokens`` a layer with these slots still holds; at most, for policies that forget do so in steps."""
        return tokens

    def seen(self, call: Call, pattern: Pattern, slots: Mapping[str, Slot]) -> Call:
        """A row's call as a layer's kernel meets it: after those past tokens that are kept, with the pairs that it is shown of them."""
        return replace(call, past=self.kept(int(call.past), slots), shown=pattern.pairs(call))

    def total_bytes(self, layers: Sequence[Mapping[str, Slot]], tokens: int, element_bytes: int) -> int:
        """Bytes that a row of ``tokens`` takes in all layers; at most, see ``kept``. States are not counted: they do not grow."""
        return sum(self.bytes_per_token(slots, element_bytes) * self.kept(tokens, slots) for slots in layers)

    def total_bytes_per_token(self, layers: Sequence[Mapping[str, Slot]], element_bytes: int) -> int:
        """Bytes that one more token of a row takes in all layers."""
        return sum(self.bytes_per_token(slots, element_bytes) for slots in layers)

    def bytes_per_token(self, slots: Mapping[str, Slot], element_bytes: int) -> int:
        """Bytes that one more token takes in one layer for as long as it is kept."""
        return sum(s.bytes(element_bytes) for s in slots.values() if s.kind == "token")
