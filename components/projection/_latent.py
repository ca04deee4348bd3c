"""What latent projections share: keys and values are linear maps of a small latent, so the latent is all that is kept."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.components.contracts import Call, Linear, Norm, Operands, PositionModule, Projection, ProjectionModule, Slot, Step
from zoo.components.spec import Child, default


@dataclass(frozen=True, kw_only=True)
class LatentBase(Projection):
    """Fields of every latent projection.

    nope, rope: key channels per head that are not rotated and that are; value: value channels per head. rank: width of a latent.
    q_rank: width of the query latent, None for queries made straight from the input. bias: on the down-projections.
    latent_norm: norm of every latent; its eps is its own and not the model's (DeepSeek's files say 1e-6 whatever the config says).
    logit_scale: multiplies q k^T; None is (nope + rope) ** -0.5, in both ways of reading.
    """

    finishes = True

    nope: int
    rope: int
    value: int
    rank: int
    q_rank: int | None = None
    bias: bool = False
    out_bias: bool = False
    latent_norm: Norm = default(Norm, "rms")
    logit_scale: float | None = None
    q_down: Linear = default(Linear, "dense")
    q_up: Linear = default(Linear, "dense")
    kv_down: Linear = default(Linear, "dense")
    kv_up: Linear = default(Linear, "dense")
    o: Linear = default(Linear, "dense")

    @property
    @abstractmethod
    def latent_count(self) -> int:
        """Latents per token; each serves an equal run of heads."""

    @property
    def rotary_width(self) -> int:
        return self.rope

    @property
    def widths(self) -> tuple[int, int]:
        """As expanded; an absorbed call is (rank + rope, rank) wide."""
        return self.nope + self.rope, self.value

    def slots(self) -> dict[str, Slot]:
        return {"c": Slot("token", (self.latent_count, self.rank)), "r": Slot("token", (1, self.rope))}

    def problems(self, width: int) -> Iterator[tuple[str, str]]:
        for name in ("heads", "value", "rank"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"
        for name in ("nope", "rope"):
            if getattr(self, name) < 0:
                yield name, f"must not be negative, got {getattr(self, name)}"
        if self.nope + self.rope < 1:
            yield "nope", "a key has no channels: nope and rope are both 0"
        if self.q_rank is not None and self.q_rank < 1:
            yield "q_rank", f"must be at least 1, or null for queries without a latent, got {self.q_rank}"

    def absorbs(self, new: float, visible: float) -> bool:
        """Whether absorbing takes fewer multiplications per head. Without a past it is never done, so training sees one form."""
        up = self.rank * (self.nope + self.value)
        expanded = visible * up + new * visible * (self.nope + self.rope + self.value)
        absorbed = new * up + new * visible * (2 * self.rank + self.rope)
        return visible > new and absorbed < expanded

    def widths_in(self, call: Call) -> tuple[int, int]:
        return (self.rank + self.rope, self.rank) if self.absorbs(call.new, call.visible) else self.widths

    def flops(self, call: Call, width: int) -> float:
        """The up-projection is applied to every visible latent, or to as many vectors as there are new tokens where it is absorbed."""
        read = call.new if self.absorbs(call.new, call.visible) else call.visible
        children = self.children(width).items()
        return sum(c.spec.flops(call.tokens(read) if n.startswith("kv_up") else call, *c.at) for n, c in children)

    def query_children(self, width: int) -> dict[str, Child]:
        up = self.heads * (self.nope + self.rope)
        if self.q_rank is None:
            return {"q_up": Child(self.q_up, (width, up, False))}
        return {
            "q_down": Child(self.q_down, (width, self.q_rank, self.bias)),
            "q_norm": Child(self.latent_norm, (self.q_rank,)),
            "q_up": Child(self.q_up, (self.q_rank, up, False)),
        }

    def outer_children(self, width: int) -> dict[str, Child]:
        return {
            "kv_down": Child(self.kv_down, (width, self.latent_count * self.rank + self.rope, self.bias)),
            "o": Child(self.o, (self.heads * self.value, width, self.out_bias)),
        }


class LatentModule(ProjectionModule):
    """Two ways to read that give the same result: *expanded* makes keys and values of every visible latent, *absorbed* moves the
    up-projections to the few queries and outputs, so that attention runs on the latents themselves (arXiv:2405.04434, 2.1.2)."""

    q_down: nn.Module
    q_norm: nn.Module
    q_up: nn.Module
    kv_down: nn.Module
    o: nn.Module

    def __init__(self, spec: LatentBase):
        super().__init__()
        self.spec = spec
        self.scale = (spec.nope + spec.rope) ** -0.5 if spec.logit_scale is None else spec.logit_scale

    def normed(self, c: Tensor) -> Tensor:
        """[B, T, latents, rank] -> the same, normed."""
        raise NotImplementedError

    def expand(self, c: Tensor) -> Tensor:
        """[B, S, latents, rank] -> keys and values [B, S, H, nope + value]."""
        raise NotImplementedError

    def up_weight(self, dtype: torch.dtype) -> Tensor:
        """[H, nope + value, rank]."""
        raise NotImplementedError

    def write(self, x: Tensor, step: Step, position: PositionModule) -> tuple[Tensor, dict[str, Tensor]]:
        """x [B, T, M] -> q [B, T, H, nope + rope] and the slots c [B, T, latents, rank], r [B, T, 1, rope]."""
        s = self.spec
        hidden = x if s.q_rank is None else self.q_norm(self.q_down(x))
        nope, rope = self.q_up(hidden).unflatten(-1, (s.heads, -1)).split([s.nope, s.rope], -1)
        c, r = self.kv_down(x).split([s.latent_count * s.rank, s.rope], -1)
        c = self.normed(c.unflatten(-1, (s.latent_count, s.rank)))
        return torch.cat([nope, position.rotate(rope, step)], -1), {"c": c, "r": position.rotate(r[:, :, None], step)}

    def read(self, q: Tensor, streams: Mapping[str, Tensor]) -> Operands:
        c, r = streams["c"], streams["r"]
        return self.absorbed(q, c, r) if self.spec.absorbs(q.shape[1], c.shape[1]) else self.expanded(q, c, r)

    def expanded(self, q: Tensor, c: Tensor, r: Tensor) -> Operands:
        k, v = self.expand(c).split([self.spec.nope, self.spec.value], -1)
        return Operands(q, torch.cat([k, r.expand(-1, -1, self.spec.heads, -1)], -1), v, self.scale)

    def absorbed(self, q: Tensor, c: Tensor, r: Tensor) -> Operands:
        """Grouped-query attention with one key/value head per latent."""
        k_up, v_up = self.up_weight(q.dtype).split([self.spec.nope, self.spec.value], 1)
        nope, rope = q.split([self.spec.nope, self.spec.rope], -1)
        q = torch.cat([torch.einsum("bthd,hdr->bthr", nope, k_up), rope], -1)
        k = torch.cat([c, r.expand(-1, -1, self.spec.latent_count, -1)], -1)
        return Operands(q, k, c, self.scale, finish=lambda o: torch.einsum("bthr,hdr->bthd", o, v_up))

    def out(self, o: Tensor) -> Tensor:
        return self.o(o.flatten(-2))
