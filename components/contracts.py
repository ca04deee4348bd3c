"""What the parts say to each other: family base classes, and the tensors that cross between the axes of the mixer.

Shape legend for the whole package: B batch, T new tokens, S visible tokens (past and new), H query heads, G key/value heads,
D head width, M model width, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from zoo.components import registry
from zoo.components.spec import Child, Spec, load

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
    segment: [B, T] int64 number of each token's document, -1 in none; None where rows are not packed. Patterns look at it.
    axes: [B, T, A] coordinates (row and column of a patch; time, row and column) that rotations over several axes turn by, -1 turns
    by nothing; None: each of them is ``pos``. ``pos`` remains the order that patterns and caches look at.
    """

    pos: Tensor
    start: int | None = None
    segment: Tensor | None = None
    axes: Tensor | None = None
    _memo: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, pos: Tensor, segment: Tensor | None = None, axes: Tensor | None = None) -> Step:
        """A step from positions alone; reads them once on the host to learn whether the batch is plain."""
        first = int(pos[0, 0]) if pos.numel() else -1
        plain = first >= 0 and torch.equal(pos, (first + torch.arange(pos.shape[1], device=pos.device)).expand_as(pos))
        return cls(pos, first if plain else None, segment, axes)

    @classmethod
    def plain(cls, start: int, batch: int, length: int, device: torch.device | str | None = None) -> Step:
        """Every row holds positions start .. start+length-1."""
        return cls(torch.arange(start, start + length, device=device).expand(batch, -1), start)

    @property
    def valid(self) -> Tensor:
        """[B, T] bool, False on padding."""
        return self.once("valid", lambda: self.pos >= 0)

    def coordinates(self, count: int) -> Tensor:
        """[B, T, count], what rotations over ``count`` axes turn by. Raises ValueError where the call has another number of axes."""
        if self.axes is None:
            return self.pos[..., None].expand(*self.pos.shape, count)
        if self.axes.shape[-1] != count:
            raise ValueError(f"the position encoding turns by {count} axes, the call's tokens have {self.axes.shape[-1]}")
        return self.axes

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


class Prepared(nn.Module):
    """A module that arranges its tensors in memory once they are in place."""

    def prepare(self) -> None:
        """Take the layout that is fastest on the device."""
        raise NotImplementedError


class StoredLinear(Prepared):
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

    def temper(self, q: Tensor, step: Step) -> Tensor:
        """The kernel's queries [B, T, H, D] -> the same, scaled by each query's position."""
        return q

    def bias(self, qpos: Tensor, kpos: Tensor) -> Tensor | None:
        """Added to the logits: [B, H, T, S], or None."""
        return None


class Tokens(NamedTuple):
    """Where queries or keys stand: positions and documents (None: not packed), in shapes that broadcast against each other."""

    pos: Tensor
    segment: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Pattern(Spec):
    """Which keys a query may see: a predicate on positions, never on indices, so padding and caches need nothing more.

    Facts that kernels may use instead of the mask: ``causal``, nothing after the query is seen; ``window``; ``whole``, every key
    that these two leave is seen; ``segmented``, documents matter.
    """

    family: ClassVar[str] = _declare("pattern", "which tokens may see which")
    causal: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    segmented: ClassVar[bool] = False

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

    family: ClassVar[str] = _declare("projection", "how queries, keys and values are made and what is kept of a token")
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
    """

    family: ClassVar[str] = _declare("kernel", "how attention is computed")
    history: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset()
    softmax: ClassVar[bool] = False
    rounding: ClassVar[float] = 0.0
    lse: ClassVar[bool] = False
    graph_safe: ClassVar[bool] = True
    trains_on: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    whole_rows: ClassVar[bool] = False

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

    @abstractmethod
    def build(self, projection: Projection) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class MLP(Spec):
    """The feed-forward part. Built with (model width); the module maps [..., M] to [..., M].

    sees_padding: the module is called with (x [B, T, M], valid [B, T] bool, or None where nothing is padding), because its tokens
    share something, as the capacity of experts.
    """

    family: ClassVar[str] = _declare("mlp", "the feed-forward part of a layer")
    sees_padding: ClassVar[bool] = False

    @property
    def causal(self) -> bool:
        """No token's output depends on a later token of its row."""
        return True

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...


class Routing(NamedTuple):
    """Which experts each token goes to. N tokens, K choices a token, E experts.

    weights: [N, K] float32, 0 where there is no choice. experts: [N, K] int64, -1 where there is no choice. logits: [N, E] float32.
    valid: [N] bool, None where no token is padding. whole: there is a choice everywhere.
    on_input: a weight multiplies its expert's input instead of its output.
    """

    weights: Tensor
    experts: Tensor
    logits: Tensor
    valid: Tensor | None = None
    whole: bool = True
    on_input: bool = False

    @property
    def count(self) -> int:
        """E."""
        return self.logits.shape[-1]


@dataclass(frozen=True, kw_only=True)
class Router(Spec):
    """How tokens choose experts. Built with (model width, experts); see RouterModule.

    causal: a token's choice does not depend on later tokens.
    """

    family: ClassVar[str] = _declare("router", "how tokens and experts choose each other")
    causal: ClassVar[bool] = True

    @abstractmethod
    def build(self, width: int, experts: int) -> RouterModule: ...


class Precise(nn.Module):
    """A module whose own tensors stay float32 or more, whatever the model is cast to. Its spec says so of each (``TensorInfo.dtype``)."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Precise:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype in (torch.float32, torch.float64) else tensor.to(moved.device, torch.float32)

        super()._apply(move, recurse)
        return self


class RouterModule(Precise):
    """x [B, T, M] or [T, M], valid [B, T] or [T] bool (None: nothing is padding) -> Routing of the N = B T tokens.

    Logits are computed in float32: rounded ones choose other experts.
    """

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Experts(Spec):
    """How the chosen experts are run. Built with (experts, model width); see ExpertsModule."""

    family: ClassVar[str] = _declare("experts", "how the chosen experts are run")

    @abstractmethod
    def build(self, experts: tuple[MLP, ...], width: int) -> ExpertsModule: ...


class ExpertsModule(nn.Module):
    """(x [N, M], routing, the E expert modules) -> [N, M], the weighted sum of what each token's experts say."""

    def prepare(self, experts: nn.ModuleList) -> None:
        """Arrange the experts' weights as suits the device; called once they are in place."""

    def forward(self, x: Tensor, routing: Routing, experts: nn.ModuleList) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Wiring(Spec):
    """How mixer, MLP and norms are joined by residuals. The Layer owns the parts; a wiring says which norms it wants and
    how to run them.

    norms: names of the norms that the layer builds. children(model width): other modules that the layer is to hold for the
    wiring, by name. run(layer, x, step, cache) -> x.
    """

    family: ClassVar[str] = _declare("wiring", "how mixer, MLP and norms are joined by residuals")
    norms: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def run(self, layer: Any, x: Tensor, step: Step, cache: Cache) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class PositionEmbedding(Spec):
    """How positions enter the embedding, once for all layers. Built with (model width); the module maps (x [B, T, M], step) to the
    same shape.
    """

    family: ClassVar[str] = _declare("position_embedding", "how a token's position is added to its embedding")

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class Embed(Spec):
    """Inputs to [B, T, M]. Built with (model width); the module maps (inputs, step) to [B, T, M].

    ``vocab`` is the number of token ids, absent where inputs are not tokens.
    """

    family: ClassVar[str] = _declare("embed", "how inputs become vectors")

    def size(self, inputs: Tensor) -> tuple[int, int]:
        """(rows, tokens a row) that inputs become; ids [B, T] unless the kind says otherwise. Raises ValueError for other inputs."""
        if inputs.dim() != 2 or inputs.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"input ids must be [batch, tokens] int64, got {list(inputs.shape)} {inputs.dtype}")
        self.check_ids(inputs)
        return inputs.shape[0], inputs.shape[1]

    def check_ids(self, ids: Tensor) -> None:
        """Raises ValueError for ids outside the vocabulary, where reading them costs no wait for a device."""
        vocab = getattr(self, "vocab", None)
        if vocab and ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise ValueError(f"input ids must lie in 0..{vocab - 1}, got {int(ids.min())}..{int(ids.max())}")

    def axes(self, inputs: Tensor) -> Tensor | None:
        """``Step.axes`` of the tokens that inputs become, [B, T, A]; None where they have no coordinates but their position."""
        return None

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class Head(Spec):
    """[B, T, M] to outputs. Built with (model width, embed spec); see HeadModule.

    tie() names the parameter that is an alias of another one, as (own name, name in the embedding), or None.
    """

    family: ClassVar[str] = _declare("head", "how vectors become outputs")

    def tie(self) -> tuple[str, str] | None:
        return None

    @abstractmethod
    def build(self, width: int, embed: Embed) -> HeadModule: ...


class HeadModule(nn.Module):
    """forward maps [..., M] to outputs, token by token or row by row; ``pool`` comes first."""

    def pool(self, x: Tensor, step: Step) -> Tensor:
        """[B, T, M] -> the same for heads that look at single tokens, [B, M] for those that look at whole rows."""
        return x


@dataclass(frozen=True, kw_only=True)
class CachePolicy(Spec):
    """What is kept of past tokens. Built with (slots per layer, rows, dtype, device); see components/cache/_ledger.py.

    What a policy promises: exact, the same numbers as without a cache. chunk_invariant, any way of cutting what follows the first
    call into calls that respect ``budget()`` gives the same numbers. rollback, tokens that ``commit`` does not keep leave no trace.
    graph_safe, a call of one token a row changes no shape and asks the device nothing. forgets, some tokens are not kept.
    """

    family: ClassVar[str] = _declare("cache", "what is kept of past tokens")
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

    def total_bytes_per_token(self, layers: Sequence[Mapping[str, Slot]], element_bytes: int) -> int:
        """Bytes that one more token of a row takes in all layers."""
        return sum(self.bytes_per_token(slots, element_bytes) for slots in layers)

    def bytes_per_token(self, slots: Mapping[str, Slot], element_bytes: int) -> int:
        """Bytes that one more token takes in one layer for as long as it is kept."""
        return sum(math.prod(s.shape) * (s.dtype.itemsize if s.dtype else element_bytes) for s in slots.values() if s.kind == "token")


def attach(module: nn.Module, children: Mapping[str, Child]) -> None:
    """Build each child and make it a submodule under its name."""
    for name, child in children.items():
        setattr(module, name, child.build())
