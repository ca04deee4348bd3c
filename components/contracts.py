"""What the parts say to each other: family base classes, and the tensors that cross between the axes of the mixer.

Shape legend for the whole package: B batch, T new tokens, S visible tokens (past and new), H query heads, G key/value heads,
D head width, M model width, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from zoo.components import registry
from zoo.components.spec import Child, Spec

X = TypeVar("X")

# ---- what crosses between the axes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """One named tensor that a layer keeps between calls.

    token: one entry of ``shape`` per token, can be cut back; state: one tensor of ``shape`` per row, only replaced.
    dtype None follows the model. window: a fact that caches may use, only the last ``window`` positions are ever read again.
    """

    kind: Literal["token", "state"]
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    window: int | None = None


@dataclass
class Step:
    """One forward call, shared by all layers.

    pos: [B, T] int64 absolute positions, -1 marks padding.
    start: where it is an int, the host knows that every row holds positions start .. start+T-1 and nothing is padding; fast
    kernels use that fact instead of a mask. None: look at ``pos``.
    """

    pos: Tensor
    start: int | None = None
    _memo: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, pos: Tensor) -> Step:
        """A step from positions alone; reads them once on the host to learn whether the batch is plain."""
        first = int(pos[0, 0]) if pos.numel() else -1
        plain = first >= 0 and torch.equal(pos, (first + torch.arange(pos.shape[1], device=pos.device)).expand_as(pos))
        return cls(pos, first if plain else None)

    @classmethod
    def plain(cls, start: int, batch: int, length: int, device: torch.device | str | None = None) -> Step:
        """Every row holds positions start .. start+length-1."""
        return cls(torch.arange(start, start + length, device=device).expand(batch, -1), start)

    @property
    def valid(self) -> Tensor:
        """[B, T] bool, False on padding."""
        return self.once("valid", lambda: self.pos >= 0)

    def once(self, key: str, make: Callable[[], X]) -> X:
        """``make()``, computed by the first layer that asks and shared by the others of this call."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]


@dataclass
class View:
    """What a layer sees after its new tokens were added.

    streams: token slots, [B, S, *slot shape] each. kpos: [B, S] their positions, -1 where there is nothing. state: state slots.
    aligned: the host knows that kpos[b, j] == j for every row. put: hands over a new state (a cache keeps it detached).
    group: layers of one group are shown the same positions in one call. narrow: the layer's pattern, less what the cache hides.
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
    """What a layer wants of a kernel; ``Kernel.refuses`` answers with reasons. Asked once, when a spec is checked."""

    pattern: Pattern
    bias: bool
    provides: frozenset[str]
    key_width: int
    value_width: int


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
        return View(dict(new), step.pos, state, aligned=step.start == 0)


# ---- families: one base class an axis ----------------------------------------------------------------------------------------


def _declare(name: str, about: str) -> str:
    registry.declare(name, f"zoo.components.{name}", about)
    return name


@dataclass(frozen=True, kw_only=True)
class Linear(Spec):
    """Storage and product of a weight matrix. Built with (inputs, outputs, bias); the module maps [..., inputs] to [..., outputs].

    The module has ``inputs`` and ``outputs``, ``dense_weight(dtype) -> [outputs, inputs]`` and ``bias`` (Parameter or None).
    """

    family: ClassVar[str] = _declare("linear", "how a weight matrix is stored and multiplied")

    @abstractmethod
    def build(self, inputs: int, outputs: int, bias: bool) -> nn.Module: ...


class StoredLinear(nn.Module):
    """A linear module whose tensors in memory may differ from those that are saved."""

    inputs: int
    outputs: int
    bias: nn.Parameter | None

    def canonical(self) -> dict[str, Tensor]:
        """The tensors as they are saved, named as by the spec's ``own_tensors``."""
        raise NotImplementedError

    def hold(self, canonical: dict[str, Tensor]) -> None:
        """Take these tensors, named as they are saved and without the bias, in place of those held."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Take the layout that is fastest on the device; called once tensors are in place."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Norm(Spec):
    """Normalisation. Built with (width); the module maps [..., width] to the same shape."""

    family: ClassVar[str] = _declare("norm", "how activations are normalised")

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Spec):
    """How rope frequencies change beyond the trained context. No module: a pure function of the frequencies.

    uses_length: the frequencies change with the length of the sequence, so keys that are cached keep older ones.
    """

    family: ClassVar[str] = _declare("rope_scaling", "how rotary frequencies are stretched beyond the trained context")
    uses_length: ClassVar[bool] = False

    def frequencies(self, base: float, width: int, length: Tensor | None) -> Tensor:
        """Angular frequencies [width/2] fp32, or [B, width/2] where they depend on ``length``, the rows' token count [B]."""
        raise NotImplementedError

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin."""
        return 1.0

    @property
    def logit_scale(self) -> float:
        """Multiplies the attention logits, rotated and unrotated parts alike."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Position(Spec):
    """How position enters attention. Built with (width of the rotated slice, query heads); see PositionModule."""

    family: ClassVar[str] = _declare("position", "how a token's position enters attention")
    has_bias: ClassVar[bool] = False

    @abstractmethod
    def build(self, width: int, heads: int) -> PositionModule: ...


class PositionModule(nn.Module):
    """The hooks of a position encoding; each kind overrides what it is about. logit_scale is a constant of the kind."""

    logit_scale: float = 1.0

    def rotate(self, x: Tensor, step: Step) -> Tensor:
        """[B, T, heads, width] -> the same, turned by each token's position."""
        return x

    def bias(self, qpos: Tensor, kpos: Tensor) -> Tensor | None:
        """Added to the logits: [B, H, T, S], or None."""
        return None


@dataclass(frozen=True, kw_only=True)
class Pattern(Spec):
    """Which keys a query may see: a predicate on positions, never on indices, so padding and caches need nothing more.

    causal: a fact that kernels may use, nothing after the query is seen.
    """

    family: ClassVar[str] = _declare("pattern", "which tokens may see which")
    causal: ClassVar[bool] = False

    @abstractmethod
    def see(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        """[B, T, 1] x [B, 1, S] -> [B, T, S] bool; padding is handled by ``mask``."""

    @property
    def window(self) -> int | None:
        """A fact that kernels may use: only the last ``window`` positions, the query's own included, are seen."""
        return None

    def mask(self, step: Step, view: View) -> Tensor:
        """[B, 1, T, S] bool, computed once per call and visible set."""
        return step.once(f"mask {self.key} {view.key}", lambda: self._mask(step.pos, view.kpos))

    def _mask(self, qpos: Tensor, kpos: Tensor) -> Tensor:
        q, k = qpos[:, :, None], kpos[:, None, :]
        return (self.see(q, k) & (k >= 0) & (q >= 0))[:, None]


@dataclass(frozen=True, kw_only=True)
class Projection(Spec):
    """What is kept per token and how operands are made of it. Built with (model width); see ProjectionModule."""

    family: ClassVar[str] = _declare("projection", "how queries, keys and values are made and what is kept of a token")
    provides: ClassVar[frozenset[str]] = frozenset()

    heads: int

    @property
    @abstractmethod
    def rotary_width(self) -> int:
        """Width of the slice that the position encoding turns."""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """(key width, value width) per head, as the kernel sees them."""

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
    """

    family: ClassVar[str] = _declare("kernel", "how attention is computed")
    history: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset()

    def states(self, projection: Projection) -> dict[str, Slot]:
        """Fixed-size slots of the kernel's own."""
        return {}

    def refuses(self, ask: Ask) -> list[str]:
        """Reasons why this kernel cannot serve the layer; empty means that it can."""
        lacking, idle = self.needs - ask.provides, ask.provides - self.needs
        reasons = [f"needs {', '.join(sorted(lacking))}, which the projection does not provide"] if lacking else []
        return reasons + ([f"has no use for {', '.join(sorted(idle))}, which the projection makes"] if idle else [])

    @abstractmethod
    def build(self, projection: Projection) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class MLP(Spec):
    """The feed-forward part. Built with (model width); the module maps [..., M] to [..., M]."""

    family: ClassVar[str] = _declare("mlp", "the feed-forward part of a layer")

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class Wiring(Spec):
    """How mixer, MLP and norms are joined by residuals. The Layer owns the parts; a wiring says which norms it wants and
    how to run them.

    norms: names of the norms that the layer builds. run(layer, x, step, cache) -> x.
    """

    family: ClassVar[str] = _declare("wiring", "how mixer, MLP and norms are joined by residuals")
    norms: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def run(self, layer: Any, x: Tensor, step: Step, cache: Cache) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Embed(Spec):
    """Inputs to [B, T, M]. Built with (model width). ``vocab`` is the number of token ids, None where inputs are not tokens."""

    family: ClassVar[str] = _declare("embed", "how inputs become vectors")

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class Head(Spec):
    """[B, T, M] to outputs. Built with (model width, embed spec).

    tie() names the parameter that is an alias of another one, as (own name, name in the embedding), or None.
    """

    family: ClassVar[str] = _declare("head", "how vectors become outputs")

    def tie(self) -> tuple[str, str] | None:
        return None

    @abstractmethod
    def build(self, width: int, embed: Embed) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class CachePolicy(Spec):
    """What is kept of past tokens. Built with (slots per layer, rows, dtype, device); see components/cache/_ledger.py.

    What a policy promises: exact, the same numbers as without a cache. chunk_invariant, any way of cutting a text into calls that
    respects ``budget()`` gives the same numbers. rollback, tokens that ``commit`` does not keep leave no trace. graph_safe, a call
    of one token a row changes no shape and asks the device nothing.
    """

    family: ClassVar[str] = _declare("cache", "what is kept of past tokens")
    exact: ClassVar[bool] = True
    chunk_invariant: ClassVar[bool] = True
    rollback: ClassVar[bool] = True
    graph_safe: ClassVar[bool] = False

    @abstractmethod
    def build(self, layers: list[dict[str, Slot]], rows: int, dtype: torch.dtype, device: torch.device) -> Any: ...

    def refuses(self, ask: Ask) -> list[str]:
        """Reasons why this policy cannot serve a layer; empty means that it can."""
        return []

    def bytes_per_token(self, slots: Mapping[str, Slot], element_bytes: int) -> int:
        """Bytes that one more token takes in one layer for as long as it is kept."""
        return sum(math.prod(s.shape) * (s.dtype.itemsize if s.dtype else element_bytes) for s in slots.values() if s.kind == "token")


def attach(module: nn.Module, children: Mapping[str, Child]) -> None:
    """Build each child and make it a submodule under its name."""
    for name, child in children.items():
        setattr(module, name, child.build())
