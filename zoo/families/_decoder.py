"""What decoder families share: a model put together axis by axis, each of which a family may say differently.

A family derives from Decoder and overrides the axes in which it differs, each as a pair: a method that reads config.json, and the one
named ``..._fields`` that says it back. ``modules`` is its table of names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from zoo.components.contracts import MLP, Embed, Head, Kernel, Norm, Pattern, Position, Projection, Wiring
from zoo.components.embed.tokens import Tokens
from zoo.components.head.lm import LMHead
from zoo.components.kernel.sdpa import SDPA
from zoo.components.mlp.gated import Gated
from zoo.components.norm.rms import RMS
from zoo.components.ops.rotary import Layout
from zoo.components.pattern.causal import Causal
from zoo.components.pattern.window import Window
from zoo.components.position.rope import Rope
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.wiring.pre import Pre
from zoo.families._rope import CONTEXT, read_rope, write_rope
from zoo.family import Family, expect
from zoo.model import LayerSpec, MixerSpec, ModelSpec
from zoo.weights import Rule

Config = Mapping[str, Any]
Fields = dict[str, Any]
ACTIVATION = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
              "gelu_fast": "gelu_tanh", "relu": "relu"}  # fmt: skip
ATTENTION = {f"mixer.projection.{n}": f"self_attn.{n}_proj" for n in "qkvo"}
GATED = {f"mlp.{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")}
FULL, SLIDING = "full_attention", "sliding_attention"
HEAD_NORMS = {f"mixer.projection.{n}_norm": f"self_attn.{n}_norm" for n in "qk"}
PRE_NORMS = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True, kw_only=True)
class Decoder(Family):
    """As LLaMA where a family does not say otherwise.

    prefix: before the names of all but the head. modules: our module -> theirs within a layer; weight and bias follow. layers,
    final_norm, table: names below the prefix. out: the head's name. activation_key: where config.json names the activation.
    defaults: of config fields, where they are not LLaMA's. biases: the field that says whether q, k and v, the output and the MLP
    have biases, or the answer where there is no field. layout: which pairs of channels are turned.
    """

    prefix: ClassVar[str] = "model."
    modules: ClassVar[Mapping[str, str]] = {**ATTENTION, **GATED, **PRE_NORMS}
    layers: ClassVar[str] = "layers"
    final_norm: ClassVar[str] = "norm"
    table: ClassVar[str] = "embed_tokens"
    out: ClassVar[str] = "lm_head"
    activation_key: ClassVar[str] = "hidden_act"
    defaults: ClassVar[Mapping[str, Any]] = {}
    biases: ClassVar[Mapping[str, str | bool]] = {"qkv": "attention_bias", "out": "attention_bias", "mlp": "mlp_bias"}
    layout: ClassVar[Layout] = "half"

    # ---- config.json -> spec

    def settled(self, config: Config) -> Config:
        """The config under the usual words, with what it leaves out filled in."""
        return {**self.defaults, **config, **{usual: config[own] for usual, own in self.spelling.items() if own in config}}

    def read(self, config: Config) -> ModelSpec:
        config = self.settled(config)
        return ModelSpec(
            width=config["hidden_size"],
            context=config.get("max_position_embeddings", CONTEXT),
            embed=self.embed(config),
            layers=tuple(self.layer(config, l) for l in range(config["num_hidden_layers"])),
            norm=self.norm(config),
            head=self.head(config),
            checkpoint=self.name,
        )

    def layer(self, config: Config, l: int) -> LayerSpec:
        mixer = MixerSpec(projection=self.projection(config, l), position=self.position(config, l), pattern=self.pattern(config, l),
                          kernel=self.kernel(config, l))  # fmt: skip
        return LayerSpec(mixer=mixer, mlp=self.mlp(config, l), norm=self.norm(config), wiring=self.wiring(config))

    def embed(self, config: Config) -> Embed:
        return Tokens(vocab=config["vocab_size"])

    def projection(self, config: Config, l: int) -> Projection:
        return GroupedQuery(**self.heads(config), bias=self.bias(config, "qkv"), out_bias=self.bias(config, "out"))

    def heads(self, config: Config) -> Fields:
        return heads(config)

    def bias(self, config: Config, where: str) -> bool:
        word = self.biases[where]
        return word if isinstance(word, bool) else bool(config.get(word, False))

    def position(self, config: Config, l: int) -> Position:
        return read_rope(config, self.heads(config)["head_dim"], layout=self.layout)

    def pattern(self, config: Config, l: int) -> Pattern:
        return Causal()

    def kernel(self, config: Config, l: int) -> Kernel:
        return SDPA()

    def mlp(self, config: Config, l: int) -> MLP:
        return Gated(hidden=config["intermediate_size"], activation=activation(config, self.activation_key), bias=self.bias(config, "mlp"))

    def norm(self, config: Config) -> Norm:
        return RMS(eps=config.get("rms_norm_eps", 1e-6))

    def wiring(self, config: Config) -> Wiring:
        return Pre()

    def head(self, config: Config) -> Head:
        return LMHead(tied=bool(config.get("tie_word_embeddings", False)))

    # ---- spec -> config.json

    def fields(self, spec: ModelSpec, config: Config) -> Fields:
        first, full = self.typical(spec), self.settled({**config, self.word("num_hidden_layers", config): len(spec.layers)})
        found = {
            "hidden_size": spec.width,
            "num_hidden_layers": len(spec.layers),
            "max_position_embeddings": spec.context,
            **self.embed_fields(spec.embed),
            **self.projection_fields(first.mixer.projection),
            **self.position_fields(spec, full),
            **self.pattern_fields(spec, full),
            **self.kernel_fields(first.mixer.kernel),
            **self.mlp_fields(first.mlp),
            **self.norm_fields(first.norm),
            **self.wiring_fields(first.wiring),
            **self.head_fields(spec.head),
            **self.other_fields(spec),
        }
        return {self.word(usual, config): self.same_word(config.get(usual), value) for usual, value in found.items()}

    def typical(self, spec: ModelSpec) -> LayerSpec:
        """The layer whose parts the config's fields describe."""
        return spec.layers[0]

    def word(self, usual: str, config: Config) -> str:
        """The family's word for a config field, or the usual one where ``config`` has that alone."""
        own = self.spelling.get(usual, usual)
        return usual if usual in config and own not in config else own

    @staticmethod
    def same_word(old: Any, new: Any) -> Any:
        """The old value where it is another word for the same activation."""
        both = isinstance(old, str) and old in ACTIVATION and new in ACTIVATION
        return old if both and ACTIVATION[old] == ACTIVATION[new] else new

    def embed_fields(self, embed: Embed) -> Fields:
        return {"vocab_size": expect(embed, Tokens).vocab}

    def projection_fields(self, projection: Projection) -> Fields:
        p = expect(projection, GroupedQuery)
        sizes = {"num_attention_heads": p.heads, "num_key_value_heads": p.kv_heads, "head_dim": p.head_dim}
        return sizes | self.bias_fields(qkv=p.bias, out=p.out_bias)

    def bias_fields(self, **found: bool) -> Fields:
        return {word: found[where] for where, word in self.biases.items() if where in found and isinstance(word, str)}

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer.position, Rope)]  # others turn nothing
        mixer = mixers[0] if mixers else self.typical(spec).mixer
        return write_rope(expect(mixer.position, Rope), config, mixer.projection.rotary_width, spec.context)

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        return {}

    def kernel_fields(self, kernel: Kernel) -> Fields:
        return {}

    def mlp_fields(self, mlp: MLP) -> Fields:
        mlp = expect(mlp, Gated)
        words = {"intermediate_size": mlp.hidden, self.activation_key: activation_name(mlp.activation)}
        return words | self.bias_fields(mlp=mlp.bias)

    def norm_fields(self, norm: Norm) -> Fields:
        return {"rms_norm_eps": expect(norm, RMS).eps}

    def wiring_fields(self, wiring: Wiring) -> Fields:
        return {}

    def head_fields(self, head: Head) -> Fields:
        return {"tie_word_embeddings": expect(head, LMHead).tied}

    def other_fields(self, spec: ModelSpec) -> Fields:
        """Fields that no axis above knows: those of several layers or axes together."""
        return {}

    # ---- names

    def known_as(self, names: Collection[str], spec: ModelSpec) -> dict[str, str]:
        """Files of a model that was saved without its head leave the prefix out."""
        whole = any(name.startswith(self.prefix) for name in names)
        return {n: n if whole or n.startswith(f"{self.out}.") else self.prefix + n for n in names}

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        """Older files hold the rotary frequencies, which follow from the config."""
        return name.endswith("rotary_emb.inv_freq") or super().ignores(name, spec)

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return [
            Rule.same(f"{self.prefix}{self.table}.weight", "embed.weight"),
            *self.layer_rules(spec),
            *same({"norm": f"{self.prefix}{self.final_norm}", "head.out": self.out}),
        ]

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        """The rules of the layers; tensors that the spec does not have are left out by the caller."""
        return same({f"layers.{{l}}.{ours}": f"{self.layer_prefix}{theirs}" for ours, theirs in self.modules.items()})

    @property
    def layer_prefix(self) -> str:
        return f"{self.prefix}{self.layers}.{{l}}."


@dataclass(frozen=True, kw_only=True)
class Sliding(Decoder):
    """A decoder whose ``layer_types`` say of each layer whether it sees all tokens or those in a window.

    period: one layer in so many sees all tokens where config.json has no types.
    """

    period: ClassVar[int] = 1

    def settled(self, config: Config) -> Config:
        config = super().settled(config)
        return {**config, "layer_types": config.get("layer_types") or self.layer_types(config)}

    def layer_types(self, config: Config) -> list[str]:
        period = config.get("sliding_window_pattern") or self.period
        return [FULL if (l + 1) % period == 0 else SLIDING for l in range(config.get("num_hidden_layers", 0))]

    def pattern(self, config: Config, l: int) -> Pattern:
        return windowed(config, l)

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        found = window_fields(spec)
        return found if found["sliding_window"] else {"layer_types": found["layer_types"]}


def same(modules: Mapping[str, str], leaves: Iterable[str] = ("weight", "bias")) -> list[Rule]:
    """Rules for modules (ours -> theirs) whose tensors are the same on both sides."""
    return [Rule.same(f"{theirs}.{leaf}", f"{ours}.{leaf}") for ours, theirs in modules.items() for leaf in leaves]


def heads(config: Config) -> Fields:
    """heads, kv_heads and head_dim, with the usual defaults."""
    count = config["num_attention_heads"]
    return {"heads": count, "kv_heads": config.get("num_key_value_heads") or count,
            "head_dim": config.get("head_dim") or config["hidden_size"] // count}  # fmt: skip


def activation(config: Config, key: str = "hidden_act") -> Any:
    word = config.get(key, "silu")
    if word not in ACTIVATION:
        raise ValueError(f"{key} {word!r} is not supported; supported: {', '.join(ACTIVATION)}")
    return ACTIVATION[word]


def activation_name(ours: str) -> str:
    return {mine: theirs for theirs, mine in reversed(ACTIVATION.items())}.get(ours, ours)


def layer_type(config: Config, l: int, *known: str) -> str | None:
    """What ``layer_types`` calls a layer, None where there are no types. Raises ValueError for a list too short and for unknown types."""
    types = config.get("layer_types")
    if not types:
        return None
    if l >= len(types) or types[l] not in known:
        what = repr(types[l]) if l < len(types) else "nothing"
        raise ValueError(f"layer_types says {what} of layer {l}; it must say {' or '.join(known)} of every layer")
    return types[l]


def windowed(config: Config, l: int) -> Pattern:
    """A sliding window where ``layer_types`` says so, or in every layer where there are no types but a window."""
    kind, window = layer_type(config, l, FULL, SLIDING), config.get("sliding_window")
    if window is None or kind == FULL:
        return Causal()
    return Window(size=window)


def window_fields(spec: ModelSpec) -> Fields:
    """``sliding_window`` and ``layer_types`` of a model whose layers are causal or windowed."""
    patterns = [layer.mixer.pattern for layer in spec.layers]
    sizes = {p.size for p in patterns if isinstance(p, Window)}
    if len(sizes) > 1:
        raise ValueError(f"the config can only say one window, the layers have {sorted(sizes)}")
    types = [SLIDING if isinstance(p, Window) else FULL for p in patterns]
    return {"sliding_window": next(iter(sizes), None), "layer_types": types}
