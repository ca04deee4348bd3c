"""Another pairing of rotated channels: rows of the query and key projections change places."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.ops.rotary import Layout
from zoo.components.position.rope import Rope
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.projection.latent import Latent
from zoo.components.registry import part
from zoo.components.spec import Child
from zoo.conversion import Conversion, ConversionError, Converted, Work, unpacked
from zoo.family import expect
from zoo.model import LayerSpec

P = "mixer.projection."


@part(Conversion, "rope_to_rope", source="Su et al. 2021, arXiv:2104.09864, section 3.4.2; transformers' conversion of LLaMA",
      example={"layout": "half"})  # fmt: skip
@dataclass(frozen=True, kw_only=True)
class RopeLayout(Conversion):
    """Channel i paired with i + width/2 (``half``) or 2i with 2i + 1 (``interleaved``); exact, for gqa and latent projections."""

    place = "mixer.position"

    layout: Layout

    def target(self, site: LayerSpec, width: int) -> LayerSpec:
        projection = site.mixer.projection
        if isinstance(projection, GroupedQuery):
            self.check_norms(projection, expect(site.mixer.position, Rope))
            projection = dataclasses.replace(projection, q=unpacked(projection.q), k=unpacked(projection.k))
        elif isinstance(projection, Latent):
            projection = dataclasses.replace(projection, q_up=unpacked(projection.q_up), kv_down=unpacked(projection.kv_down))
        else:
            raise ConversionError(f"rope's layout can be changed under gqa and latent projections, not {projection.name}")
        position = dataclasses.replace(expect(site.mixer.position, Rope), layout=self.layout)
        return dataclasses.replace(site, mixer=dataclasses.replace(site.mixer, projection=projection, position=position))

    def check_norms(self, projection: GroupedQuery, rope: Rope) -> None:
        """Raises ConversionError where a q/k norm tells channels apart by more than their own entries in its tensors."""
        if rope.layout == self.layout:
            return
        rows = order(projection.head_dim, 0, rope.width or projection.head_dim, self.layout)
        for norm in norms(projection).values():
            (width,), run = norm.at, norm.spec.together(*norm.at)  # pyright: ignore[reportAttributeAccessIssue]
            channel = torch.arange(width)
            moved = channel.unflatten(0, (-1, projection.head_dim))[:, rows].flatten()
            if not torch.equal(moved // run, channel // run):
                raise ConversionError(f"the q/k norm {norm.spec.name} takes statistics of {run} channels each, which others would join")
            strange = [n for n, t in norm.spec.tensors(width).items() if width in t.shape and n not in by_channel(norm)]
            if strange:
                raise ConversionError(f"{strange[0]} of the q/k norm {norm.spec.name} has more than one entry for each channel")

    def convert(self, work: Work) -> Converted:
        rope, projection = expect(work.old.mixer.position, Rope), work.old.mixer.projection
        if rope.layout == self.layout:
            return Converted({}, exact=True)
        turned = rope.width or projection.rotary_width
        made: dict[str, Tensor] = {}
        for name, start, size in rotated(work.old):
            if name in work.held:
                heads = work.held[name].unflatten(0, (-1, size))
                made[name] = heads[:, order(size, start, turned, self.layout)].flatten(0, 1)
        return Converted(made, exact=True)


def rotated(layer: LayerSpec) -> Iterator[tuple[str, int, int]]:
    """(tensor, first rotated row of a head, rows of a head) of everything that makes rotated channels."""
    s = layer.mixer.projection
    if isinstance(s, Latent):
        yield f"{P}q_up.weight", s.nope, s.nope + s.rope
        for leaf in ("weight", "bias"):
            yield f"{P}kv_down.{leaf}", s.rank, s.rank + s.rope
    elif isinstance(s, GroupedQuery):
        scales = [f"{n}.{leaf}" for n, c in norms(s).items() for leaf in by_channel(c)]
        for name in ("q.weight", "q.bias", "k.weight", "k.bias", *scales):
            yield f"{P}{name}", 0, s.head_dim


def norms(projection: GroupedQuery) -> dict[str, Child]:
    return {n: c for n, c in projection.children(0).items() if n in ("q_norm", "k_norm")}


def by_channel(norm: Child) -> list[str]:
    """A norm's tensors that have an entry for each channel."""
    return [name for name, tensor in norm.spec.tensors(*norm.at).items() if tensor.shape == norm.at]


def order(size: int, start: int, turned: int, layout: Layout) -> Tensor:
    """For each row of a head in the new layout, where it stood: rows from ``start`` on, as many as are turned, are paired anew."""
    rows = torch.arange(size)
    pairs = rows[start : start + turned].clone()
    rows[start : start + turned] = (
        pairs.unflatten(0, (2, -1)).T.flatten() if layout == "interleaved" else pairs.unflatten(0, (-1, 2)).T.flatten()
    )
    return rows
