"""What decoders before LLaMA share: layer norms, an MLP without a gate, as many key heads as query heads, q, k and v in one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from zoo.components.contracts import MLP, Norm, Projection
from zoo.components.mlp.plain import Plain
from zoo.components.norm.layer import Layer
from zoo.components.projection.gqa import GroupedQuery
from zoo.families._decoder import Config, Decoder, Fields, activation, activation_name, same
from zoo.family import expect
from zoo.layouts import split_groups
from zoo.model import ModelSpec
from zoo.weights import Op, Rule

QKV = ("mixer.projection.q", "mixer.projection.k", "mixer.projection.v")


@dataclass(frozen=True, kw_only=True)
class Classic(Decoder):
    """fused: their tensor of q, k and v in a layer, "" where they are apart.

    beside: modules of the embedding (ours -> theirs, below the prefix). norm_key: where config.json names eps. norm_bias: whether
    norms have one.
    """

    fused: ClassVar[str]
    beside: ClassVar[Mapping[str, str]] = {}
    biases: ClassVar[Mapping[str, str | bool]] = {"qkv": True, "out": True, "mlp": True}
    norm_key: ClassVar[str] = "layer_norm_epsilon"
    norm_bias: ClassVar[bool] = True

    def heads(self, config: Config) -> dict[str, int]:
        """Every head has keys of its own, and the heads share the width."""
        count, width = config["num_attention_heads"], config["hidden_size"]
        if count < 1 or width % count:
            raise ValueError(f"hidden_size {width} must be a multiple of num_attention_heads {count}")
        return {"heads": count, "kv_heads": count, "head_dim": width // count}

    def projection_fields(self, projection: Projection) -> Fields:
        p = expect(projection, GroupedQuery)
        return {"num_attention_heads": p.heads, **self.bias_fields(qkv=p.bias, out=p.out_bias)}

    def mlp(self, config: Config, l: int) -> MLP:
        hidden = config.get("intermediate_size") or 4 * config["hidden_size"]
        return Plain(hidden=hidden, activation=activation(config, self.activation_key), bias=self.bias(config, "mlp"))

    def mlp_fields(self, mlp: MLP) -> Fields:
        mlp = expect(mlp, Plain)
        words = {"intermediate_size": mlp.hidden, self.activation_key: activation_name(mlp.activation)}
        return words | self.bias_fields(mlp=mlp.bias)

    def norm(self, config: Config) -> Norm:
        return Layer(eps=config.get(self.norm_key, 1e-5), bias=self.norm_bias)

    def norm_fields(self, norm: Norm) -> Fields:
        return {self.norm_key: expect(norm, Layer).eps}

    def cut(self, projection: GroupedQuery) -> Op:
        """How the tensor of q, k and v on disk becomes three: they lie together, key head by key head with its query heads."""
        width = projection.head_dim
        return split_groups(projection.kv_heads, [projection.heads // projection.kv_heads * width, width, width])

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return [*super().rules(spec), *same({ours: self.prefix + theirs for ours, theirs in self.beside.items()})]

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        rules = super().layer_rules(spec)
        for l, layer in enumerate(spec.layers):
            if self.fused and isinstance(layer.mixer.projection, GroupedQuery):
                theirs = f"{self.layer_prefix}{self.fused}".format(l=l)
                rules += fused(theirs, [f"layers.{l}.{m}" for m in QKV], self.cut(layer.mixer.projection))
        return rules


def fused(theirs: str, ours: Sequence[str], op: Op) -> list[Rule]:
    """Rules for modules whose weights, and biases, are one tensor on disk."""
    return [Rule((f"{theirs}.{leaf}",), tuple(f"{module}.{leaf}" for module in ours), op) for leaf in ("weight", "bias")]


def refuse(config: Config, **wanted: object) -> None:
    """Raise ValueError, naming them all, for fields that are there and say anything but what is supported."""
    odd = [f"{word} is {config[word]!r}, supported is {value!r}" for word, value in wanted.items() if config.get(word, value) != value]
    if odd:
        raise ValueError("; ".join(odd))
