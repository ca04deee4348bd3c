"""What families with mixtures of experts share: which layers are mixtures, what they are made of, and the names of their tensors.

A family derives from Mixture and overrides ``router`` and whatever else it does in its own way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.components.contracts import MLP, Router
from zoo.components.mlp.gated import Gated
from zoo.components.mlp.moe import MoE
from zoo.components.router._presets import PRESETS
from zoo.components.router.top_k import TopK
from zoo.families._decoder import Config, Decoder, Fields, activation, activation_name
from zoo.family import expect
from zoo.layouts import across, split_evenly, then, unstacked
from zoo.model import ModelSpec
from zoo.weights import Op, Rule

PARTS = ("gate", "up", "down")
PROJ = tuple(f"{part}_proj" for part in PARTS)
MOST = 10_000  # experts of a layer
STACKED = ".experts.gate_up_proj"


def gated(ours: str, theirs: str, names: tuple[str, ...] = PROJ) -> dict[str, str]:
    """Names of the three projections of a gated part, for ``Decoder.modules``."""
    return {f"{ours}.{part}": f"{theirs}.{name}" for part, name in zip(PARTS, names, strict=True)}


def shared_expert(moe: MoE) -> Gated:
    """The shared expert of a family that always has one. Raises ValueError where there is none."""
    if moe.shared is None:
        raise ValueError("the config can only say mixtures with a shared expert, the model's have none")
    return expect(moe.shared, Gated)


def one_of(config: Config, key: str, *known: Any) -> None:
    """Raise ValueError where a config field that files may leave out has another value than those known."""
    if key in config and config[key] not in known:
        raise ValueError(f"{key} {config[key]!r} is not supported; supported: {', '.join(map(repr, known))}")


@dataclass(frozen=True, kw_only=True)
class Mixture(Decoder):
    """Decoder whose layers are mixtures of gated experts, all or some of them.

    In ``modules``, ``mlp.experts.{e}.gate`` and so on name the tensors of single experts. block: their name of the feed-forward part.
    tensors: our tensor -> theirs within a layer, of those that are no module's weight or bias. expert_key: where config.json says how
    wide an expert is. normed: ``norm_topk_prob`` says whether the chosen experts' weights are made to sum to 1.
    """

    block: ClassVar[str] = "mlp"
    tensors: ClassVar[Mapping[str, str]] = {}
    expert_key: ClassVar[str] = "moe_intermediate_size"
    normed: ClassVar[bool] = False

    # ---- config.json -> spec

    def mlp(self, config: Config, l: int) -> MLP:
        return self.mixture(config) if self.sparse(config, l) else self.dense(config)

    def sparse(self, config: Config, l: int) -> bool:
        """Whether layer ``l`` is a mixture."""
        return True

    def mixture(self, config: Config) -> MoE:
        count = config["num_experts"]
        if not isinstance(count, int) or not 0 < count <= MOST:
            raise ValueError(f"{self.spelling.get('num_experts', 'num_experts')} is {count!r}; it must lie in 1..{MOST}")
        experts, shared = (self.expert(config),) * count, self.shared(config)
        return MoE(router=self.router(config), experts=experts, shared=shared, shared_gate="mlp.shared_gate" in self.tensors)

    def router(self, config: Config) -> TopK:
        preset = PRESETS[self.name]
        weigh = ("renormalize" if config.get("norm_topk_prob") else "keep") if self.normed else preset.weigh
        return replace(preset, k=config["num_experts_per_tok"], weigh=weigh)

    def expert(self, config: Config) -> MLP:
        return Gated(hidden=config[self.expert_key], activation=activation(config, self.activation_key))

    def shared(self, config: Config) -> MLP | None:
        return None

    def dense(self, config: Config) -> MLP:
        return super().mlp(config, 0)

    # ---- spec -> config.json

    def mlp_fields(self, mlp: MLP) -> Fields:
        return self.mixture_fields(mlp) if isinstance(mlp, MoE) else self.dense_fields(mlp)

    def other_fields(self, spec: ModelSpec) -> Fields:
        """Of the first mixture, the first dense part, and of where which of them stand."""
        sparse = [isinstance(layer.mlp, MoE) for layer in spec.layers]
        firsts = [spec.layers[sparse.index(kind)].mlp for kind in (False, True) if kind in sparse]
        return {k: v for mlp in firsts for k, v in self.mlp_fields(mlp).items()} | self.sparse_fields(sparse)

    def sparse_fields(self, sparse: list[bool]) -> Fields:
        """``sparse`` of each layer."""
        return {}

    def mixture_fields(self, moe: MoE) -> Fields:
        expert = self.expert_fields(moe.experts[0])
        return {"num_experts": len(moe.experts), **expert, **self.router_fields(moe.router), **self.shared_fields(moe)}

    def router_fields(self, router: Router) -> Fields:
        router = expect(router, TopK)
        normed = {"norm_topk_prob": router.weigh == "renormalize"} if self.normed else {}
        return {"num_experts_per_tok": router.k, **normed}

    def expert_fields(self, expert: MLP) -> Fields:
        expert = expect(expert, Gated)
        return {self.expert_key: expert.hidden, self.activation_key: activation_name(expert.activation)}

    def shared_fields(self, moe: MoE) -> Fields:
        return {}

    def dense_fields(self, mlp: MLP) -> Fields:
        mlp = expect(mlp, Gated)
        words = {"intermediate_size": mlp.hidden, self.activation_key: activation_name(mlp.activation)}
        return words | self.bias_fields(mlp=mlp.bias)

    # ---- names

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        own = [Rule.same(f"{self.layer_prefix}{theirs}", f"layers.{{l}}.{ours}") for ours, theirs in self.tensors.items()]
        return super().layer_rules(spec) + own

    def rules_for(self, spec: ModelSpec, names: Collection[str]) -> list[Rule]:
        """transformers 5 can also store what it computes with: one tensor for all experts of a layer, below ``mlp``."""
        rules = self.rules(spec)
        single = any("{e}" in name for rule in rules for name in rule.theirs)
        if not (single and any(name.endswith(STACKED) for name in names)):
            return rules
        mlp = f"{self.layer_prefix}mlp."
        renamed = [replace(r, theirs=tuple(t.replace(f"{self.layer_prefix}{self.block}.", mlp) for t in r.theirs)) for r in rules]
        return [r for r in renamed if "{e}" not in r.ours[0]] + stacked(f"{mlp}experts")


@dataclass(frozen=True, kw_only=True)
class Stepped(Mixture):
    """Qwen's way to say which layers are mixtures: one in ``decoder_sparse_step``, but none of ``mlp_only_layers``."""

    normed = True

    def sparse(self, config: Config, l: int) -> bool:
        return l not in (config.get("mlp_only_layers") or ()) and (l + 1) % config.get("decoder_sparse_step", 1) == 0

    def sparse_fields(self, sparse: list[bool]) -> Fields:
        return {"decoder_sparse_step": 1, "mlp_only_layers": [l for l, mixture in enumerate(sparse) if not mixture]}


def stacked(experts: str) -> list[Rule]:
    """Rules for experts in two tensors, [E, 2 hidden, M] with the gate first and [E, M, hidden]."""
    return [
        expert_rule(f"{experts}.gate_up_proj", ("gate.weight", "up.weight"), then(unstacked(), across(split_evenly(2), 2))),
        expert_rule(f"{experts}.down_proj", ("down.weight",), unstacked()),
    ]


def expert_rule(theirs: str, ours: tuple[str, ...], op: Op, rows: Op | None = None) -> Rule:
    """The rule of one tensor that holds these of all experts. rows: the change where they are packed."""
    return Rule((theirs,), tuple(f"layers.{{l}}.mlp.experts.{{e}}.{name}" for name in ours), op, rows=rows)


def mixers_of(rules: list[Rule], layers: Iterable[int]) -> list[Rule]:
    """The rules, those about mixers for these layers alone."""
    return [replace(r, layers=frozenset(layers)) if ".mixer." in r.ours[0] else r for r in rules]
