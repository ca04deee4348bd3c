"""More or fewer key/value heads: GQA to MHA by repeating, to fewer heads by the mean of each run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.contracts import Norm
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.conversion import Conversion, ConversionError, Converted, Work, relative, unpacked
from zoo.conversions.rope_to_rope import by_channel
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
        check_norm(old, count)
        new = dataclasses.replace(old, kv_heads=count, k=unpacked(old.k), v=unpacked(old.v))
        return dataclasses.replace(site, mixer=dataclasses.replace(site.mixer, projection=new))

    def convert(self, work: Work) -> Converted:
        before, after = expect(work.old.mixer.projection, GroupedQuery), expect(work.new.mixer.projection, GroupedQuery)
        leaves = ["k.weight", "k.bias", "v.weight", "v.bias", *(f"k_norm.{n}" for n in of_all_heads(before))]
        names = [f"mixer.projection.{leaf}" for leaf in leaves]
        made = {n: regroup(work.held[n], before.kv_heads, after.kv_heads) for n in names if n in work.held}
        error = max(relative(regroup(t, after.kv_heads, before.kv_heads), work.held[n]) for n, t in made.items())
        exact = after.kv_heads >= before.kv_heads
        return Converted(made, exact, 0.0 if exact else error)


def of_all_heads(projection: GroupedQuery) -> list[str]:
    """Tensors of the keys' norm with an entry for each channel of all heads together."""
    norm = projection.children(0).get("k_norm")
    return by_channel(norm) if norm and projection.qk_norm_at == "flat" else []


def check_norm(old: GroupedQuery, count: int) -> None:
    """Raises ConversionError where a norm over all heads would mix other heads, or has tensors that nobody knows how to regroup."""
    norm = old.qk_norm
    if norm is None or old.qk_norm_at != "flat" or count == old.kv_heads or [*norm.problems(count * old.head_dim)]:
        return  # a width that the norm cannot have is told by the check of the planned model
    here, there = (norm.tensors(heads * old.head_dim) for heads in (old.kv_heads, count))
    strange = [n for n in here if here[n] != there.get(n) and n not in of_all_heads(old)]
    if strange:
        raise ConversionError(f"kv_heads: {strange[0]} of the q/k norm {norm.name} goes with the width, but has no entry for each channel")
    if not same_statistics(norm, old.head_dim, *sorted((old.kv_heads, count))):
        raise ConversionError(f"kv_heads: with {count} the q/k norm {norm.name} would take the statistics of other heads together")


def same_statistics(norm: Norm, head_dim: int, few: int, many: int) -> bool:
    """Whether each run of channels that share statistics holds, once heads are repeated, an equal number of copies of one run before."""
    channel = torch.arange(few * head_dim)
    before, run = channel // norm.together(few * head_dim), norm.together(many * head_dim)
    copies = regroup(channel, few, many)
    for together in copies.split(run):
        count = torch.bincount(together, minlength=len(channel))
        if not torch.equal(count > 0, before == before[together[0]]) or len(count[count > 0].unique()) > 1:
            return False
    return True


def regroup(rows: Tensor, old: int, new: int) -> Tensor:
    """[old * D, ...] -> [new * D, ...]: each head repeated, or the mean of each run of heads."""
    heads = rows.unflatten(0, (old, -1))
    heads = heads.repeat_interleave(new // old, 0) if new >= old else heads.unflatten(0, (new, -1)).mean(1)
    return heads.flatten(0, 1)
