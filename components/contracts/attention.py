"""The other axes of the mixer, pattern, projection and kernel, and the tensors that cross between them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from zoo.components.contracts._declare import declare
from zoo.components.contracts.position import PositionModule
from zoo.components.contracts.step import Slot, Step
from zoo.components.cost import Call
from zoo.components.spec import Spec, load


@dataclass
class View:
    """What a layer sees after its new tokens were added.

    streams: token slots, [B, S, *slot shape] each. kpos: [B, S] their positions, -1 where there is nothing. state: state slots.
    aligned: the host knows that kpos[b, j] == j for every row. put: hands over a new state (a cache keeps it detached).
    group: layers of one group are shown the same positions in one call. narrow: the layer's pattern, less what the cache hides.
    ksegment: [B, S] documents of the visible tokens, None where the cache does not keep them.
    observe: called with (operands, step, pattern, position) before the kernel runs; a cache that evicts by attention votes there.
    """

    streams: dict[str, Tensor]
    kpos: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)
    aligned: bool = False
    put: Callable[[str, Tensor], None] = lambda name, new: None
    group: int = 0
    narrow: Callable[[Pattern], Pattern] = lambda pattern: pattern
    observe: Callable[[Operands, Step, Pattern, PositionModule], None] = lambda operands, step, pattern, position: None
    ksegment: Tensor | None = None

    @property
    def key(self) -> str:
        """Names the visible set within one call, for what layers share through ``Step.once``."""
        return f"{self.group} {tuple(self.kpos.shape)}"


def identity(x: Tensor) -> Tensor:
    return x


@dataclass
class Operands:
    """What a kernel computes on. q [B, T, H, Dk], k [B, S, G, Dk], v [B, S, G, Dv]; extra: gates and decays by name.

    scale multiplies q k^T. finish maps the kernel's [B, T, H, Dv] to the layer's head outputs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    extra: dict[str, Tensor] = field(default_factory=dict)
    finish: Callable[[Tensor], Tensor] = identity


@dataclass(frozen=True)
class Ask:
    """What a layer wants of a kernel and of a cache; their ``refuses`` answer with reasons. Asked once, when a spec is checked.

    whole_rows: a fact about the layer's kernel, see there.
    """

    pattern: Pattern
    bias: bool
    provides: frozenset[str]
    key_width: int
    value_width: int
    whole_rows: bool = False


class Tokens(NamedTuple):
    """Where queries or keys stand: positions and documents (None: not packed), in shapes that broadcast against each other."""

    pos: Tensor
    segment: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Pattern(Spec):
    """Which keys a query may see: a predicate on positions, never on indices, so padding and caches need nothing more.

    Facts that kernels may use instead of the mask: ``causal``, nothing after the query is seen; ``window``; ``whole``, every key
    that these two leave is seen; ``segmented``, documents matter; ``separates``, no token sees one of another document.
    """

    family: ClassVar[str] = declare("pattern", "which tokens may see which")
    causal: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    segmented: ClassVar[bool] = False
    separates: ClassVar[bool] = False

    @abstractmethod
    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        """[B, T, 1] x [B, 1, S] -> [B, T, S] bool; padding is handled by ``mask``."""

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        """``see`` for patterns that look at more than positions; elementwise, so it also serves single tokens."""
        return self.see(q.pos, k.pos)

    def __and__(self, other: Pattern) -> Pattern:
        return load(Pattern, {"name": "all_of", "patterns": (self, other)})

    def __or__(self, other: Pattern) -> Pattern:
        return load(Pattern, {"name": "any_of", "patterns": (self, other)})

    @property
    def window(self) -> int | None:
        """A fact that kernels may use: only the last ``window`` positions, the query's own included, are seen."""
        return None

    def pairs(self, call: Call) -> float:
        """How many (query, key) pairs of a row are seen; of more than 512 queries, evenly spaced ones stand for the others."""
        new, past = int(call.new), int(call.past)
        queries = torch.linspace(past, past + new - 1, min(new, 512), device="cpu").round().long()
        keys = torch.arange(past + new, device="cpu")
        return sum(int(self.see(q, keys).sum()) for q in queries) * new / len(queries)

    def mask(self, step: Step, view: View) -> Tensor:
        """[B, 1, T, S] bool, computed once per call and visible set."""
        return step.once(f"mask {self.key} {view.key}", lambda: self._mask(step, view))

    def _mask(self, step: Step, view: View) -> Tensor:
        q = Tokens(step.pos[:, :, None], None if step.segment is None else step.segment[:, :, None])
        k = Tokens(view.kpos[:, None, :], None if view.ksegment is None else view.ksegment[:, None, :])
        return (self.allows(q, k) & (k.pos >= 0) & (q.pos >= 0))[:, None]


@dataclass(frozen=True, kw_only=True)
class Projection(Spec):
    """What is kept per token and how operands are made of it. Built with (model width); see ProjectionModule.

    provides: names in ``Operands.extra``. finishes: the kernel's output is not yet the heads' output, ``Operands.finish`` makes it.
    """

    family: ClassVar[str] = declare("projection", "how queries, keys and values are made and what is kept of a token")
    provides: ClassVar[frozenset[str]] = frozenset()
    finishes: ClassVar[bool] = False

    heads: int

    @property
    def groups(self) -> int:
        """Key/value heads as the kernel sees them, where it does not depend on the call."""
        return self.heads

    @property
    @abstractmethod
    def rotary_width(self) -> int:
        """Width of the slice that the position encoding turns."""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """(key width, value width) per head, as the kernel sees them."""

    def widths_in(self, call: Call) -> tuple[int, int]:
        """``widths`` in a call, for projections that read in more than one way."""
        return self.widths

    @abstractmethod
    def slots(self) -> dict[str, Slot]:
        """Token slots, kept for kernels that read past tokens. Empty: only kernels with a state of their own can follow."""

    def states(self) -> dict[str, Slot]:
        """State slots of the projection's own (a short convolution's last inputs), kept whatever the kernel."""
        return {}

    @abstractmethod
    def build(self, width: int) -> ProjectionModule: ...


class ProjectionModule(nn.Module):
    """write: tokens to queries and new slots; read: queries and visible slots to operands; out: head outputs to the residual.

    A projection with states overrides ``operands`` instead of ``read``.
    """

    def write(self, x: Tensor, step: Step, position: PositionModule) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError

    def read(self, q: Tensor, streams: Mapping[str, Tensor]) -> Operands:
        raise NotImplementedError

    def operands(self, q: Tensor, view: View, step: Step, position: PositionModule) -> Operands:
        return self.read(q, view.streams)

    def out(self, o: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Kernel(Spec):
    """How attention is computed. Built with (projection spec); the module maps (operands, view, step, pattern, position) to
    [B, T, H, Dv]. A query that may see nothing gives 0.

    history: the kernel reads past tokens, so the projection's slots are kept. needs: names it takes from ``Operands.extra``.
    softmax: it computes plain softmax attention to the last bits of its dtype, so any other such kernel may stand in for it.
    rounding: how far, relative to the largest output, the kernel's own number formats may move an output; 0 means not at all.
    lse: the module's ``attend`` maps a Scene to a Partial, so that sets of keys can be seen apart and merged.
    graph_safe: nothing is read back from the device, so a call can be compiled whole and captured in a graph.
    trains_on: device types on which it has gradients. whole_rows: tokens count by their number in the row, so none may be forgotten.
    masks: hidden pairs are computed and then masked, so they cost what seen ones do.
    """

    family: ClassVar[str] = declare("kernel", "how attention is computed")
    history: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset()
    softmax: ClassVar[bool] = False
    rounding: ClassVar[float] = 0.0
    lse: ClassVar[bool] = False
    graph_safe: ClassVar[bool] = True
    trains_on: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    whole_rows: ClassVar[bool] = False
    masks: ClassVar[bool] = False

    def at_layer(self, index: int) -> Kernel:
        """The spec as layer ``index`` builds it; kinds that depend on depth fill it in."""
        return self

    def states(self, projection: Projection) -> dict[str, Slot]:
        """Fixed-size slots of the kernel's own."""
        return {}

    def refuses(self, ask: Ask) -> list[str]:
        """Reasons why this kernel cannot serve the layer; empty means that it can."""
        lacking, idle = self.needs - ask.provides, ask.provides - self.needs
        reasons = [f"needs {', '.join(sorted(lacking))}, which the projection does not provide"] if lacking else []
        return reasons + ([f"has no use for {', '.join(sorted(idle))}, which the projection makes"] if idle else [])

    def flops(self, call: Call, projection: Projection) -> float:
        """Scores and weighted values of the pairs that the pattern shows, or of all where the kernel masks."""
        pairs = call.new * call.visible if self.masks else call.pairs
        return 2 * projection.heads * sum(projection.widths_in(call)) * pairs

    @abstractmethod
    def build(self, projection: Projection) -> nn.Module: ...
