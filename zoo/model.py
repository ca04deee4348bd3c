"""The model: embedding, layers, final norm, head. Every kind of model is this one class over other parts.

Shapes: B batch, T new tokens, M model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zoo.components import registry
from zoo.components.contracts import (
    MLP,
    Ask,
    Cache,
    CachePolicy,
    Call,
    Chained,
    Embed,
    Head,
    HeadModule,
    Kernel,
    Norm,
    Pattern,
    Position,
    PositionModule,
    Projection,
    ProjectionModule,
    Slot,
    Step,
    Wiring,
    attach,
)
from zoo.components.spec import Child, Spec, TensorInfo, default
from zoo.inputs import checked_axes, checked_documents, restarting


@dataclass(frozen=True, kw_only=True)
class MixerSpec(Spec):
    """Attention as five choices; see docs/architecture.md."""

    projection: Projection
    position: Position = default(Position, "none")
    pattern: Pattern = default(Pattern, "causal")
    kernel: Kernel = default(Kernel, "sdpa")

    def children(self, width: int, index: int) -> dict[str, Child]:
        return {
            "projection": Child(self.projection, (width,)),
            "position": Child(self.position, (self.projection.rotary_width, self.projection.heads)),
            "pattern": Child(self.pattern),
            "kernel": Child(self.kernel.at_layer(index), (self.projection,)),
        }

    def flops(self, call: Call, width: int, index: int) -> float:
        """The pattern's pairs unless the call knows them already, as where a cache keeps some of its past tokens only."""
        seen = call if call.shown is not None else replace(call, shown=self.pattern.pairs(call))
        return super().flops(seen, width, index)

    def slots(self) -> dict[str, Slot]:
        """What this layer keeps between calls."""
        kept = self.projection.slots() if self.kernel.history else {}
        tokens = {n: replace(s, window=self.pattern.window) for n, s in kept.items()}
        return tokens | self.projection.states() | self.kernel.states(self.projection)

    @property
    def ask(self) -> Ask:
        """What this layer wants of a kernel and of a cache."""
        facts = (self.projection.provides, *self.projection.widths, self.kernel.whole_rows)
        return Ask(self.pattern, self.position.has_bias, *facts)

    def problems(self, width: int, index: int) -> Iterator[tuple[str, str]]:
        for reason in self.kernel.refuses(self.ask):
            yield "kernel", f"{self.kernel.name} {reason}"
        if self.kernel.history and not self.projection.slots():
            yield "kernel", f"{self.kernel.name} reads past tokens, of which projection {self.projection.name} keeps nothing"

    def build(self, width: int, index: int) -> Mixer:
        return Mixer(self, width, index)


class Mixer(nn.Module):
    """One attention layer of any kind."""

    projection: ProjectionModule
    position: PositionModule
    kernel: nn.Module

    def __init__(self, spec: MixerSpec, width: int, index: int):
        super().__init__()
        self.index, self.slots, self.pattern = index, spec.slots(), spec.pattern
        assert self.pattern.key  # worked out here, where a compiler does not look
        attach(self, {n: c for n, c in spec.children(width, index).items() if n != "pattern"})

    def forward(self, x: Tensor, step: Step, cache: Cache) -> Tensor:
        q, new = self.projection.write(x, step, self.position)
        view = cache.extend(self.index, new, step, self.slots)
        pattern = view.narrow(self.pattern)
        a = self.projection.operands(q, view, step, self.position)
        a.q = self.position.temper(a.q, step)
        view.observe(a, step, pattern, self.position)
        return self.projection.out(a.finish(self.kernel(a, view, step, pattern, self.position)))


@dataclass(frozen=True, kw_only=True)
class LayerSpec(Spec):
    """One layer: a mixer and an MLP, joined by a wiring with norms of one kind."""

    mixer: MixerSpec
    mlp: MLP
    norm: Norm = default(Norm, "rms")
    wiring: Wiring = default(Wiring, "pre")

    def children(self, width: int, index: int) -> dict[str, Child]:
        norms = {n: Child(self.norm, (width,)) for n in self.wiring.norms}
        inside = {"mixer": Child(self.mixer, (width, index)), "mlp": Child(self.mlp, (width,))}
        return inside | norms | self.wiring.children(width)

    def problems(self, width: int, index: int) -> Iterator[tuple[str, str]]:
        if self.mixer.pattern.causal and not self.mlp.causal:
            yield "mlp", f"{self.mlp.name} lets a token see later ones, which pattern {self.mixer.pattern.name} hides"

    def build(self, width: int, index: int) -> Layer:
        return Layer(self, width, index)


class Layer(nn.Module):
    """[B, T, M] -> [B, T, M]. Its norms have the names that the wiring wants."""

    mixer: Mixer
    mlp: nn.Module

    def __init__(self, spec: LayerSpec, width: int, index: int):
        super().__init__()
        self.wiring, self.sees_padding = spec.wiring, spec.mlp.sees_padding
        attach(self, spec.children(width, index))

    def forward(self, x: Tensor, step: Step, cache: Cache) -> Tensor:
        layer = _ToldOfPadding(self, step) if self.sees_padding else self
        return self.wiring.run(layer, x, step, cache)


class _ToldOfPadding:
    """A layer as its wiring sees it, whose MLP is called with the tokens' validity, so that wirings need not know of it."""

    def __init__(self, layer: Layer, step: Step):
        self._layer, self._valid = layer, step.valid if step.start is None else None

    def mlp(self, x: Tensor) -> Tensor:
        return self._layer.mlp(x, self._valid)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    """A whole model.

    width: M. context: positions it was trained for (a record, not a limit). checkpoint: the family whose names its files use.
    """

    width: int
    context: int
    embed: Embed
    layers: tuple[LayerSpec, ...]
    head: Head
    norm: Norm = default(Norm, "rms")
    cache: CachePolicy = default(CachePolicy, "dense")
    checkpoint: str = "llama"

    def children(self) -> dict[str, Child]:
        return {
            "embed": Child(self.embed, (self.width,)),
            **{f"layers.{i}": Child(layer, (self.width, i)) for i, layer in enumerate(self.layers)},
            "norm": Child(self.norm, (self.width,)),
            "head": Child(self.head, (self.width, self.embed)),
        }

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.width < 1:
            yield "width", f"must be at least 1, got {self.width}"
        if self.context < 1:
            yield "context", f"must be at least 1, got {self.context}"
        if self.checkpoint not in registry.names("family"):
            yield "checkpoint", f"no family is named {self.checkpoint!r}{registry.nearest(self.checkpoint, registry.names('family'))}"
        if not self.layers:
            yield "layers", "a model has at least one layer"
        yield from ((f"cache.{where}", why) for where, why in self.cache.problems())
        for i, layer in enumerate(self.layers):
            for reason in self.cache.refuses(layer.mixer.ask):
                yield "cache", f"{self.cache.name} cannot serve layer {i}: it {reason}"

    def flops(self, call: Call) -> float:
        """As of every spec; layers look at those past tokens that the cache keeps."""
        seen = {layer: self.cache.seen(call, layer.mixer.pattern, layer.mixer.slots()) for layer in set(self.layers)}
        return sum(c.spec.flops(seen[c.spec] if isinstance(c.spec, LayerSpec) else call, *c.at) for c in self.children().values())

    def slots(self) -> list[dict[str, Slot]]:
        return [layer.mixer.slots() for layer in self.layers]

    def cache_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes that one more token of one row takes, all layers together."""
        return self.cache.total_bytes_per_token(self.slots(), element_bytes)

    def parameters(self) -> dict[str, TensorInfo]:
        """Every stored tensor by name, without building anything."""
        return self.tensors()

    def build(self) -> Model:
        return Model(self)


WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def checked_positions(positions: Tensor, rows: int, width: int, device: torch.device) -> Tensor:
    """Positions as int64. Raises ValueError unless they are whole numbers from -1 on, of the ids' shape and device.

    Their range is only looked at where that costs no wait for a device.
    """
    if positions.shape != (rows, width):
        raise ValueError(f"positions {list(positions.shape)} must have the shape of the ids {[rows, width]}")
    if positions.dtype not in WHOLE:
        raise ValueError(f"positions must be whole numbers (int64), got {positions.dtype}")
    if positions.device != device:
        raise ValueError(f"positions are on {positions.device}, the ids on {device}; pass positions.to(ids.device)")
    if device.type == "cpu" and positions.numel() and int(positions.min()) < -1:
        raise ValueError(f"positions must be at least 0, or -1 for padding; the lowest is {int(positions.min())}")
    return positions.long()


class Model(nn.Module):
    """A callable model: ``model(ids) -> logits [B, T, V]``.

    spec: what it is made of. config: the checkpoint's own config.json (empty for a model built from a spec). tokenizer: loaded
    when first used.
    """

    embed: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    head: HeadModule

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.config: dict[str, Any] = {}
        self.source: Any = None  # where the weights came from; knows the tokenizer
        self.placement: Any = None  # zoo.streaming.Streaming, where a device_map spread the model
        children = spec.children()
        attach(self, {n: children[n] for n in ("embed", "norm", "head")})
        self.layers = nn.ModuleList(child.build() for name, child in children.items() if name.startswith("layers."))
        self.tie()
        chained = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Chained)]
        for mlp, following in pairwise(chained):
            mlp.chain(following)

    def tie(self) -> None:
        """Make the head's tied parameter an alias of the embedding's."""
        tied = self.spec.head.tie()
        if tied:
            owner, _, leaf = f"head.{tied[0]}".rpartition(".")
            setattr(self.get_submodule(owner), leaf, getattr(self.embed, tied[1]))

    def forward(self, ids: Tensor, *, lengths: Sequence[int] | Tensor | None = None, positions: Tensor | None = None,
                cache: Any | None = None, last: bool = False, documents: Tensor | None = None,
                axes: Tensor | None = None) -> Tensor:  # fmt: skip
        """ids [B, T] int64 -> logits [B, T, V] in the model's dtype.

        lengths: [B] valid tokens per row, the rest is right padding. positions: [B, T] absolute positions, -1 = padding, for left
        padding, packing and offsets; by default tokens continue where ``cache`` ends. last: only the last column's logits, [B, 1, V].
        documents: [B, T] number of each token's document in a packed row, -1 = padding; every layer's pattern must look at them
        (``{name: all_of, patterns: [causal, document]}``), and positions start anew in each unless they are given.
        axes: [B, T, A] coordinates of each token for positions that turn by several (mrope: time, row, column), -1 turns by nothing;
        by default each is the token's position.
        Logits of padding are meaningless. Raises ValueError for ids that are not [B, T] int64 or outside the vocabulary, and for
        positions, lengths, documents and axes of another shape, kind, range or device, or that the model has no use for.
        """
        step = self.step(ids, lengths, positions, cache, documents, axes)
        try:
            x = self.hidden(ids, step, self.spec.cache.without() if cache is None else cache)
        except BaseException:
            if cache is not None and any(cache.pending):
                cache.commit([0] * len(cache.length))  # what a call that failed half-way wrote must not be taken for tokens
            raise
        if cache is not None:
            cache.commit()
        x = self.head.pool(x, step)
        if last and x.dim() == 2:
            raise ValueError(f"last asks for the last token's output, but head {self.spec.head.name} gives one output a row; leave it out")
        return self.head(x[:, -1:] if last else x)

    def hidden(self, ids: Tensor, step: Step, cache: Cache) -> Tensor:
        """ids [B, T] -> final normed hidden states [B, T, M]. A cache keeps the tokens as pending until ``commit``."""
        x = self.embed(ids, step)
        for layer in self.layers:
            x = layer(x, step, cache)
        return self.norm(x)

    def step(self, ids: Tensor, lengths: Any = None, positions: Tensor | None = None, cache: Any | None = None,
             documents: Tensor | None = None, axes: Tensor | None = None) -> Step:  # fmt: skip
        """Check the inputs of one call and work out its positions."""
        size, own = self.spec.embed.size(ids), self.spec.embed.axes(ids)
        if axes is not None:
            if own is not None:
                raise ValueError(f"embed {self.spec.embed.name} knows the coordinates of its tokens; leave axes out")
            own = checked_axes(axes, self.spec, size, ids.device)
        if documents is not None:
            documents = checked_documents(documents, self.spec, size, ids.device, cache is not None)
            if lengths is not None:
                raise ValueError("give lengths or documents, not both: documents say by -1 what is padding")
            positions = restarting(documents) if positions is None else positions
        step = self._place(*size, ids.device, lengths, positions, cache)
        step.axes, step.inputs, step.segment = own, ids, documents
        return step

    def _place(self, rows: int, width: int, device: torch.device, lengths: Any, positions: Tensor | None, cache: Any | None) -> Step:
        past = [0] * rows if cache is None else cache.length
        if len(past) != rows:
            raise ValueError(f"the cache has {len(past)} rows, the input {rows}")
        if positions is not None:
            if lengths is not None:
                raise ValueError("give lengths or positions, not both: positions say by -1 what is padding")
            return Step.of(checked_positions(positions, rows, width, device))
        if lengths is None and len(set(past)) <= 1:
            return Step.plain(past[0] if past else 0, rows, width, device)
        count = torch.full((rows,), width) if lengths is None else torch.as_tensor(lengths)
        whole = count.dtype in WHOLE and count.shape == (rows,)
        if not whole or int(count.min()) < 0 or int(count.max()) > width:
            raise ValueError(f"lengths must be {rows} whole numbers in 0..{width}, got {count.tolist()}")
        column = torch.arange(width)[None]
        pos = torch.where(column < count[:, None], column + torch.tensor(past)[:, None], -1)
        return Step.of(pos.to(device))

    def new_cache(self, rows: int) -> Any:
        """An empty cache of the spec's policy for ``rows`` rows."""
        if self.placement is not None:
            return self.placement.new_cache(self, rows)
        return self.spec.cache.build(self.spec.slots(), rows, self.dtype, self.device)

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Where inputs go and outputs come from."""
        return next(self.parameters()).device if self.placement is None else self.placement.device

    def check_whole(self, doing: str) -> None:
        """Raise ValueError where a device_map spread the model, so that ``doing`` would miss some of its weights."""
        if self.placement is not None:
            raise ValueError(f"{doing} needs a model at one place, a device_map spread this one; load it without device_map")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        self.check_whole("moving or casting")
        return super()._apply(fn, recurse)

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer (a transformers PreTrainedTokenizerFast). Raises ValueError where there is none."""
        if self.source is None:
            raise ValueError("this model was built from a spec and has no tokenizer; load a checkpoint, or pass token ids")
        return self.source.tokenizer

    def generate(self, prompt: Any, **options: Any) -> Any:
        """Text or ids to text or ids; see zoo.generation.generate for the options."""
        from zoo.generation import generate

        return generate(self, prompt, **options)
