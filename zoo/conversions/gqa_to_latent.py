"""Grouped-query attention as latent attention: exact at full rank, smaller by a low-rank latent and fewer rotated channels."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.norm.identity import Identity
from zoo.components.position.none import NoPosition
from zoo.components.position.rope import Rope
from zoo.components.position.rope_repeated import RopeRepeated
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.projection.latent import Latent
from zoo.components.registry import part
from zoo.conversion import Conversion, ConversionError, Converted, Work, relative
from zoo.family import expect
from zoo.model import LayerSpec

BY_FREQUENCY = ("none", "linear", "llama3")  # scalings of a frequency that do not ask how many others there are; yarn's ramp does
P = "mixer.projection."


@part(Conversion, "gqa_to_latent", source="Meng et al. 2025 (TransMLA), arXiv:2502.07864; Ji et al. 2025 (MHA2MLA), arXiv:2502.14837")
@dataclass(frozen=True, kw_only=True)
class GroupedQueryToLatent(Conversion):
    """The rotated channels of all key heads become the shared rotated key; the other channels and the values become the latent.

    rank: width of the latent, None is enough to lose nothing; the loss is the least for the calibration text, or for white inputs
    without one. rope: rotated channels that are kept of each key head, those of the highest frequencies; the others stop turning and
    go into the latent. None keeps all. G key heads of D channels take rank + G * rope numbers per token instead of 2 G D.
    """

    rank: int | None = None
    rope: int | None = None

    @property
    def calibrated(self) -> bool:
        return self.rank is not None

    def target(self, site: LayerSpec, width: int) -> LayerSpec:
        old = expect(site.mixer.projection, GroupedQuery)
        lacks = [what for what, there in (("q/k norm", old.qk_norm), ("bias on queries", old.bias), ("clip", old.clip)) if there]
        if lacks:
            raise ConversionError(f"latent has no {lacks[0]}, which this model's gqa has")
        turned, kept = self.channels(site)
        rows = old.kv_heads * (2 * old.head_dim - kept)
        if self.rank is not None and self.rank < 1:
            raise ConversionError(f"rank: must be at least 1, got {self.rank}")
        projection = Latent(
            heads=old.heads,
            nope=old.head_dim - kept,
            rope=old.kv_heads * kept,
            value=old.head_dim,
            rank=min(self.rank or rows, rows),
            latent_norm=Identity(),
            out_bias=old.out_bias,
            logit_scale=old.head_dim**-0.5 if old.logit_scale is None else old.logit_scale,
            o=old.o,
        )
        position = shorter(site.mixer.position, turned, kept, old.kv_heads)
        return dataclasses.replace(site, mixer=dataclasses.replace(site.mixer, projection=projection, position=position))

    def channels(self, layer: LayerSpec) -> tuple[int, int]:
        """(rotated channels of a key head, those that stay so)."""
        position, projection = layer.mixer.position, expect(layer.mixer.projection, GroupedQuery)
        if not isinstance(position, (Rope, NoPosition)):
            raise ConversionError(f"position {position.name} cannot be moved to a latent; only rope and none can")
        turned = (position.width or projection.head_dim) if isinstance(position, Rope) else 0
        kept = turned if self.rope is None else self.rope
        if kept % 2 or not 0 <= kept <= turned or (turned and not kept):
            raise ConversionError(f"rope: must be even and in 2..{turned} (rotated channels of a key head), got {kept}")
        return turned, kept

    def convert(self, work: Work) -> Converted:
        before, after = expect(work.old.mixer.projection, GroupedQuery), expect(work.new.mixer.projection, Latent)
        turned, kept = self.channels(work.old)
        position = work.old.mixer.position
        layout = position.layout if isinstance(position, Rope) else "half"
        stay, rest = split(before.head_dim, turned, kept, layout)
        q, k, v = (work.held[f"{P}{n}.weight"].unflatten(0, (-1, before.head_dim)) for n in "qkv")
        joint = torch.cat([k[:, rest], v], 1)
        down, up = factor(joint.flatten(0, 1), after.rank, work.moment)
        made = {
            f"{P}kv_down.weight": torch.cat([down, k[:, stay].flatten(0, 1)]),
            f"{P}kv_up.weight": up.view(*joint.shape[:2], -1).repeat_interleave(before.heads // before.kv_heads, 0).flatten(0, 1),
            f"{P}q_up.weight": queries(q, stay, rest, before.kv_heads),
        }
        lost = f"{turned - kept} of {turned} rotated channels of a key head no longer turn" if kept < turned else ""
        error = relative(up @ down, joint.flatten(0, 1))
        return Converted(made, exact=not lost and after.rank == joint.flatten(0, 1).shape[0], error=error, lost=lost)


def shorter(position: Rope | NoPosition | object, turned: int, kept: int, slices: int) -> Rope | RopeRepeated | NoPosition:
    """The position encoding of the shared key: the first ``kept`` channels' frequencies, in ``slices`` slices."""
    if not isinstance(position, Rope):
        return NoPosition()
    if kept < turned and position.scaling.name not in BY_FREQUENCY:
        raise ConversionError(f"rope: the frequencies of scaling {position.scaling.name} change with their number; keep all (rope: null)")
    # theta^(-2i/turned) is (theta^(kept/turned))^(-2i/kept): the leading frequencies of a wide table are a narrow table's.
    theta = position.theta if kept == turned else position.theta ** (kept / turned)
    rope = dataclasses.replace(position, theta=theta, width=None)
    return rope if slices == 1 else RopeRepeated(slices=slices, rope=rope)


def split(head_dim: int, turned: int, kept: int, layout: str) -> tuple[Tensor, Tensor]:
    """(channels that stay rotated, in pairs as the layout wants them; all others)."""
    pairs = torch.arange(kept // 2)
    stay = torch.cat([pairs, pairs + turned // 2]) if layout == "half" else torch.arange(kept)
    rest = torch.ones(head_dim, dtype=torch.bool)
    rest[stay] = False
    return stay, rest.nonzero().flatten()


def queries(q: Tensor, stay: Tensor, rest: Tensor, groups: int) -> Tensor:
    """q [H, D, M] -> rows of q_up: each head looks at its own key's slice of the shared rotated key only."""
    heads, _, width = q.shape
    slices = q.new_zeros(heads, groups, len(stay), width)
    slices[torch.arange(heads), torch.arange(heads) // (heads // groups)] = q[:, stay]
    return torch.cat([q[:, rest], slices.flatten(1, 2)], 1).flatten(0, 1)


def factor(weight: Tensor, rank: int, moment: Tensor | None) -> tuple[Tensor, Tensor]:
    """weight [R, M] ~ up [R, rank] @ down [rank, M], the best for inputs of second moment ``moment`` (None: white)."""
    if rank >= len(weight):
        return weight, torch.eye(len(weight), device=weight.device)
    exact = weight.double()
    if moment is not None:
        values, vectors = torch.linalg.eigh(moment.to(exact.device))
        up = torch.linalg.svd(exact @ (vectors * values.clamp(min=0).sqrt()), full_matrices=False).U[:, :rank]
    else:
        up = torch.linalg.svd(exact, full_matrices=False).U[:, :rank]
    return (up.T @ exact).float(), up.float()
