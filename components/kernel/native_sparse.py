"""Native sparse attention: compressed blocks, selected blocks and a window, weighed by gates.

Shapes: as in ``ops.attention.Scene``, and C compressed blocks, J selectable blocks, P keys filled up to whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Ask, Call, Kernel, Linear, Operands, Pattern, PositionModule, Projection, Step, View, attach
from zoo.components.kernel._softmax import heads_last, in_order, scene
from zoo.components.ops.attention import Scene, attention
from zoo.components.ops.softmax import safe
from zoo.components.ops.softmax.running import product
from zoo.components.registry import part
from zoo.components.spec import Child, TensorInfo, default


@part(
    Kernel,
    "native_sparse",
    source="Yuan et al. 2025, arXiv:2502.11089, section 3.3",
    example={"block": 2, "stride": 1, "select_block": 4, "select": 3, "window": 3},
)
@dataclass(frozen=True, kw_only=True)
class NativeSparse(Kernel):
    """Each query sees blocks squeezed to one key by an MLP, the ``select`` blocks that these favour, and a window; gates weigh them.

    block, stride: tokens of a compressed block, and from one to the next. select_block: tokens of a block that is picked; the
    first and the query's own and previous one always are. window: positions back, the own included. compress: the MLPs' linears.
    The three branches share keys and values. Compression and selection run over the whole row in every call; a fused kernel would
    keep compressed blocks.
    """

    block: int = 32
    stride: int = 16
    select_block: int = 64
    select: int = 16
    window: int = 512
    compress: Linear = default(Linear, "dense")
    needs = frozenset({"gates"})
    whole_rows = True

    def refuses(self, ask: Ask) -> list[str]:
        reasons = ["takes no position bias: a compressed block has no one position"] if ask.bias else []
        pos = torch.arange(4 * self.block, device="cpu")
        if _whole_blocks(ask.pattern.see(pos[:, None], pos), self.block, self.stride).sum(-1).max() < 2:
            reasons.append(f"has nothing to choose from: pattern {ask.pattern.name} shows no query two whole blocks of {self.block} tokens")
        return super().refuses(ask) + reasons

    def problems(self, projection: Projection) -> Iterator[tuple[str, str]]:
        for name in ("block", "stride", "select_block", "window"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"
        if self.stride > 0 and (self.block % self.stride or self.select_block % self.stride):
            yield "stride", f"must divide block ({self.block}) and select_block ({self.select_block}), got {self.stride}"
        if self.select < 3:
            yield "select", f"the first, the previous and the own block are always picked, so at least 3, got {self.select}"
        if getattr(projection, "gates", 3) != 3:
            yield "", "native_sparse weighs three branches: the projection's gates must be 3"

    def children(self, projection: Projection) -> dict[str, Child]:
        pairs = zip(("k", "v"), projection.widths, strict=True)
        sizes = {n: (self.block * w, w, True) for n, w in pairs}
        into = {f"{n}_in": Child(self.compress, size) for n, size in sizes.items()}
        out = {"k_out": (*projection.widths[:1] * 2, False), "v_out": (*projection.widths[1:] * 2, True)}  # softmax ignores a bias on k
        return into | {n: Child(self.compress, size) for n, size in out.items()}

    def own_tensors(self, projection: Projection) -> dict[str, TensorInfo]:
        key, value = projection.widths
        return {"k_place": TensorInfo((self.block, key)), "v_place": TensorInfo((self.block, value))}

    def flops(self, call: Call, projection: Projection) -> float:
        """Blocks are squeezed anew in every call, for each key/value head; queries meet them, the picked blocks and the window."""
        seen = call.pairs / call.new
        met = seen / self.stride + min(seen, self.select * self.select_block) + min(seen, self.window)
        squeezed = call.tokens(projection.groups * call.visible / self.stride)
        made = sum(c.spec.flops(squeezed, *c.at) for c in self.children(projection).values())
        return made + 2 * projection.heads * sum(projection.widths_in(call)) * call.new * met

    def build(self, projection: Projection) -> nn.Module:
        return NativeSparseKernel(self, projection)


class NativeSparseKernel(nn.Module):
    """k_place, v_place [block, D]: what is added to a token for its place in a compressed block."""

    k_in: nn.Module
    k_out: nn.Module
    v_in: nn.Module
    v_out: nn.Module

    def __init__(self, spec: NativeSparse, projection: Projection):
        super().__init__()
        self.spec = spec
        attach(self, spec.children(projection))
        key, value = projection.widths
        self.k_place = nn.Parameter(torch.randn(spec.block, key) * 0.02)
        self.v_place = nn.Parameter(torch.randn(spec.block, value) * 0.02)

    def forward(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
        s, kpos = self._in_whole_blocks(scene(a, view, step, pattern, position), view.kpos)
        coarse = self._compressed(s)
        weights = safe(coarse.logits())
        near = step.pos[:, :, None] - kpos[:, None, :] < self.spec.window
        branches = (
            product(weights, coarse.v),
            attention(replace(s, keep=s.keep & self._selected(weights, s.keep, step.pos, kpos))),
            attention(replace(s, keep=s.keep & near[:, None, None])),
        )
        gates = a.extra["gates"].sigmoid().unflatten(2, (s.k.shape[1], -1)).permute(4, 0, 2, 3, 1)[..., None]  # [3, B, G, R, T, 1]
        return heads_last(sum((g * o for g, o in zip(gates, branches, strict=True)), start=torch.zeros(())), a.v)

    def _in_whole_blocks(self, s: Scene, kpos: Tensor) -> tuple[Scene, Tensor]:
        """Keys in the order of their positions, filled up to whole blocks with keys that are not seen; positions [B, P]."""
        order = in_order(kpos)
        row = order[:, None, None, :, None]
        k, v = (x.gather(3, row.expand(*x.shape[:3], -1, x.shape[-1])) for x in (s.k, s.v))
        keep = s.keep.gather(4, order[:, None, None, None].expand_as(s.keep))
        size = self.spec.select_block
        fill = max(self.spec.block - order.shape[1], 0)
        fill += -(order.shape[1] + fill) % size
        k, v = (F.pad(x, (0, 0, 0, fill)) for x in (k, v))
        return replace(s, k=k, v=v, keep=F.pad(keep, (0, fill))), F.pad(kpos.gather(1, order), (0, fill), value=-1)

    def _compressed(self, s: Scene) -> Scene:
        """One key and value per block; a query sees a block if it sees all of its tokens."""
        k = self._squeezed(s.k, self.k_place, self.k_in, self.k_out)
        v = self._squeezed(s.v, self.v_place, self.v_in, self.v_out)
        return replace(s, k=k, v=v, keep=_whole_blocks(s.keep, self.spec.block, self.spec.stride))

    def _squeezed(self, x: Tensor, place: Tensor, into: nn.Module, out: nn.Module) -> Tensor:
        """[B, G, 1, P, D] -> [B, G, 1, C, D]."""
        tiles = x.unfold(3, self.spec.block, self.spec.stride).mT + place
        return out(F.gelu(into(tiles.flatten(-2))))

    def _selected(self, weights: Tensor, keep: Tensor, qpos: Tensor, kpos: Tensor) -> Tensor:
        """[B, G, 1, T, P] bool: keys in picked blocks. Heads of a group pick together (equations 9 to 12)."""
        size, count = self.spec.select_block, kpos.shape[1] // self.spec.select_block
        scores = weights.detach().sum(2, keepdim=True) @ self._shared(weights.shape[-1], count, weights)
        block = torch.arange(count, device=kpos.device)
        rank = ((kpos[:, None, :] <= qpos[:, :, None]) & (kpos >= 0)[:, None, :]).sum(-1) - 1
        own = rank.clamp(min=0)[:, None, None, :, None] // size
        forced = (block == 0) | (block == own) | (block == own - 1)
        seen = keep.unflatten(-1, (count, size)).any(-1)
        ranked = scores.masked_fill(forced, torch.inf).masked_fill(~seen, -torch.inf)
        picked = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, ranked.topk(min(self.spec.select, count), -1).indices, True)
        return picked.repeat_interleave(size, -1)

    def _shared(self, compressed: int, count: int, like: Tensor) -> Tensor:
        """[C, J]: how many strides a compressed and a selectable block have in common."""
        first = torch.arange(compressed, device=like.device)[:, None]
        start = torch.arange(count, device=like.device) * (self.spec.select_block // self.spec.stride)
        end = torch.minimum(first + self.spec.block // self.spec.stride, start + self.spec.select_block // self.spec.stride)
        return (end - torch.maximum(first, start)).clamp(min=0).to(like.dtype)


def _whole_blocks(keep: Tensor, block: int, stride: int) -> Tensor:
    """keep [..., P] bool -> [..., C]: where all tokens of a block are seen."""
    before = F.pad(keep.int().cumsum(-1), (1, 0))
    return (before[..., block:] - before[..., :-block] == block)[..., ::stride]
