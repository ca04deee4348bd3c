"""More or fewer key/value heads: GQA to MHA by repeating, to fewer heads by the mean of each run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.conversion import Conversion, ConversionError, Converted, Work, relative, unpacked
from zoo.family import expect
from zoo.model import LayerSpec


@part(Conversion, "gqa_to_gqa", source="Ainslie et al. 2023, arXiv:2305.13245, section 2.1")
@dataclass(frozen=True, kw_only=True)
class KeyValueHeads(Conversion):
    """Another number of key/value heads: repeated, which is exact, or the mean of each run of heads.

    kv_heads: None is one for each query head (MHA), 1 is MQA.
    """

    kv_heads: int | None = None

    def target(self, site: LayerSpec, width: int) -> LayerSpec:
        old = expect(site.mixer.projection, GroupedQuery)
        count = old.heads if self.kv_heads is None else self.kv_heads
        if count < 1 or (count % old.kv_heads and old.kv_heads % count):
            raise ConversionError(f"kv_heads: {count} is neither a multiple nor a divisor of the model's {old.kv_heads}")
        new = dataclasses.replace(old, kv_heads=count, k=unpacked(old.k), v=unpacked(old.v))
        return dataclasses.replace(site, mixer=dataclasses.replace(site.mixer, projection=new))

    def convert(self, work: Work) -> Converted:
        before, after = expect(work.old.mixer.projection, GroupedQuery), expect(work.new.mixer.projection, GroupedQuery)
        names = [f"mixer.projection.{n}" for n in ("k.weight", "k.bias", "v.weight", "v.bias")]
        if before.qk_norm_at == "flat":
            names.append("mixer.projection.k_norm.weight")
        made = {n: regroup(work.held[n], before.kv_heads, after.kv_heads) for n in names if n in work.held}
        error = max(relative(regroup(t, after.kv_heads, before.kv_heads), work.held[n]) for n, t in made.items())
        exact = after.kv_heads >= before.kv_heads
        return Converted(made, exact, 0.0 if exact else error)


def regroup(rows: Tensor, old: int, new: int) -> Tensor:
    """[old * D, ...] -> [new * D, ...]: each head repeated, or the mean of each run of heads."""
    heads = rows.unflatten(0, (old, -1))
    heads = heads.repeat_interleave(new // old, 0) if new >= old else heads.unflatten(0, (new, -1)).mean(1)
    return heads.flatten(0, 1)
