"""Latent attention multiplied out: keys and values of every head are stored again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.components.norm.identity import Identity
from zoo.components.position.none import NoPosition
from zoo.components.position.rope import Rope
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.projection.latent import Latent
from zoo.components.registry import part
from zoo.conversion import Conversion, ConversionError, Converted, Work
from zoo.family import expect
from zoo.model import LayerSpec

P = "mixer.projection."


@part(Conversion, "latent_to_gqa", source="DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2, the products written out")
@dataclass(frozen=True, kw_only=True)
class LatentToGroupedQuery(Conversion):
    """MLA to MHA, exact: the down- and up-projections are multiplied out. Only without a latent norm, which is no weight.

    A head has the rotated channels first, then the others; keys or values are padded with zeros to the wider of both.
    """

    def target(self, site: LayerSpec, width: int) -> LayerSpec:
        old, position = expect(site.mixer.projection, Latent), site.mixer.position
        if not isinstance(old.latent_norm, Identity):
            raise ConversionError(f"the latent norm {old.latent_norm.name} acts on activations and cannot be multiplied into weights")
        if old.bias:
            raise ConversionError("biases on down-projections would give keys a bias that queries need not have")
        if not isinstance(position, (Rope, NoPosition)):
            raise ConversionError(f"position {position.name} cannot be moved to heads of their own; only rope and none can")
        head_dim = max(old.nope + old.rope, old.value)
        projection = GroupedQuery(
            heads=old.heads, kv_heads=old.heads, head_dim=head_dim, out_bias=old.out_bias,
            logit_scale=(old.nope + old.rope) ** -0.5 if old.logit_scale is None else old.logit_scale,
        )  # fmt: skip
        if isinstance(position, Rope):
            turned = position.width or old.rope
            position = dataclasses.replace(position, width=None if turned == head_dim else turned)
        return dataclasses.replace(site, mixer=dataclasses.replace(site.mixer, projection=projection, position=position))

    def convert(self, work: Work) -> Converted:
        before, after = expect(work.old.mixer.projection, Latent), expect(work.new.mixer.projection, GroupedQuery)
        weights = {name: work.held[f"{P}{name}.weight"] for name in ("q_up", "kv_down", "kv_up", "o")}
        query = weights["q_up"] if before.q_rank is None else weights["q_up"] @ work.held[f"{P}q_down.weight"]
        q_nope, q_rope = query.unflatten(0, (before.heads, -1)).split([before.nope, before.rope], 1)
        latent, rotated = weights["kv_down"].split([before.rank, before.rope])
        k_nope, v = (weights["kv_up"] @ latent).unflatten(0, (before.heads, -1)).split([before.nope, before.value], 1)
        out = weights["o"].unflatten(1, (before.heads, -1))
        made = {
            "q": padded(torch.cat([q_rope, q_nope], 1), after.head_dim).flatten(0, 1),
            "k": padded(torch.cat([rotated.expand(before.heads, -1, -1), k_nope], 1), after.head_dim).flatten(0, 1),
            "v": padded(v, after.head_dim).flatten(0, 1),
            "o": padded(out, after.head_dim, 2).flatten(1),
        }
        return Converted({f"{P}{name}.weight": tensor for name, tensor in made.items()}, exact=True)


def padded(x: Tensor, size: int, dim: int = 1) -> Tensor:
    """Zeros behind ``x`` up to ``size`` along ``dim``."""
    shape = list(x.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)
