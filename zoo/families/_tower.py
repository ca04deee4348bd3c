"""What encoders of images, and of texts beside images, share: LayerNorm before each branch, biased attention, a plain MLP.

Tensors are named as in a file of the model alone; ``prefix`` comes before them where it is part of a larger one.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoo.components.contracts import MLP, Embed, Head, Norm, Pattern, Projection, Wiring
from zoo.components.embed.patches import Patches
from zoo.components.embed.tokens import Tokens
from zoo.components.mlp.plain import Plain
from zoo.components.norm.layer import Layer
from zoo.components.pattern.full import Full
from zoo.components.position_embedding.learned import Learned
from zoo.components.position_embedding.learned_grid import LearnedGrid
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.wiring.pre import Pre
from zoo.families._decoder import ACTIVATION, Config, Fields, heads, same
from zoo.family import Family, expect
from zoo.layouts import viewed
from zoo.model import LayerSpec, MixerSpec, ModelSpec
from zoo.weights import Op, Rule

ACTIVATIONS: dict[str, Any] = {**ACTIVATION, "quick_gelu": "gelu_sigmoid", "tanh": "tanh"}
ATTENTION = {**{f"mixer.projection.{n}": f"self_attn.{n}_proj" for n in "qkv"}, "mixer.projection.o": "self_attn.out_proj"}
CLIP_LAYER = {**ATTENTION, "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2", "mixer_norm": "layer_norm1", "mlp_norm": "layer_norm2"}


@dataclass(frozen=True, kw_only=True)
class Tower(Family):
    """An encoder put together axis by axis; a family overrides those in which it differs.

    defaults: config fields that files may leave out. modules: our module -> theirs within a layer. outer: modules of a head that
    files hold beside the encoder (ours -> theirs), in which case ``prefix`` comes before the encoder's names.
    """

    prefix: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    modules: ClassVar[Mapping[str, str]] = CLIP_LAYER
    layers: ClassVar[str] = "encoder.layers"
    final_norm: ClassVar[str] = "final_layer_norm"

    # ---- config.json -> spec

    def read(self, config: Config) -> ModelSpec:
        config = {**self.defaults, **config}
        embed = self.embed(config)
        layers = tuple(self.layer(config) for _ in range(config["num_hidden_layers"]))
        return ModelSpec(width=config["hidden_size"], context=positions(embed), embed=embed, layers=layers,
                         norm=self.norm(config), head=self.head(config), checkpoint=self.name)  # fmt: skip

    @abstractmethod
    def embed(self, config: Config) -> Embed: ...

    @abstractmethod
    def head(self, config: Config) -> Head: ...

    def layer(self, config: Config) -> LayerSpec:
        mixer = MixerSpec(projection=self.projection(config), pattern=self.pattern(config))
        return LayerSpec(mixer=mixer, mlp=self.mlp(config), norm=self.norm(config), wiring=self.wiring(config))

    def projection(self, config: Config) -> Projection:
        return GroupedQuery(**heads(config), bias=True, out_bias=True)

    def pattern(self, config: Config) -> Pattern:
        return Full()

    def mlp(self, config: Config) -> MLP:
        return Plain(hidden=config["intermediate_size"], activation=activation(config))

    def norm(self, config: Config) -> Norm:
        return Layer(eps=config["layer_norm_eps"])

    def wiring(self, config: Config) -> Wiring:
        return Pre()

    # ---- spec -> config.json

    def fields(self, spec: ModelSpec, config: Config) -> Fields:
        first = spec.layers[0]
        return {
            "hidden_size": spec.width,
            "num_hidden_layers": len(spec.layers),
            "layer_norm_eps": expect(first.norm, Layer).eps,
            **self.embed_fields(spec.embed, {**self.defaults, **config}),
            **self.projection_fields(expect(first.mixer.projection, GroupedQuery)),
            **self.mlp_fields(first.mlp, {**self.defaults, **config}),
            **self.wiring_fields(first.wiring),
            **self.head_fields(spec.head, config),
        }

    @abstractmethod
    def embed_fields(self, embed: Embed, config: Config) -> Fields: ...

    def projection_fields(self, projection: GroupedQuery) -> Fields:
        return {"num_attention_heads": projection.heads}

    def mlp_fields(self, mlp: MLP, config: Config) -> Fields:
        mlp = expect(mlp, Plain)
        return {"intermediate_size": mlp.hidden, "hidden_act": activation_name(mlp.activation, config["hidden_act"])}

    def wiring_fields(self, wiring: Wiring) -> Fields:
        return {}

    def head_fields(self, head: Head, config: Config) -> Fields:
        return {}

    # ---- names

    def rules(self, spec: ModelSpec) -> list[Rule]:
        inner = [*self.embed_rules(spec), *self.layer_rules(spec), *same({"norm": self.final_norm}), *self.head_rules(spec)]
        outer = self.outer(spec.head)
        return [prefixed(rule, self.prefix) for rule in inner] + same(outer) if outer else inner

    @abstractmethod
    def embed_rules(self, spec: ModelSpec) -> list[Rule]: ...

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        return same({f"layers.{{l}}.{ours}": f"{self.layers}.{{l}}.{theirs}" for ours, theirs in self.modules.items()})

    def outer(self, head: Head) -> dict[str, str]:
        return {}

    def head_rules(self, spec: ModelSpec) -> list[Rule]:
        """Rules of a head that files hold within the encoder."""
        return []

    def known_as(self, names: Collection[str], spec: ModelSpec) -> dict[str, str]:
        """An encoder has its prefix where it was saved as part of a larger model, whatever is read of it now."""
        outer = tuple(self.outer(spec.head).values())
        if not outer:
            return {name: name.removeprefix(self.prefix) for name in names}
        whole = any(name.startswith(self.prefix) for name in names)
        return {name: name if whole or name.startswith(outer) else self.prefix + name for name in names}


@dataclass(frozen=True, kw_only=True)
class TextTower(Tower):
    """Token ids with learned positions."""

    prefix = "text_model."

    def embed(self, config: Config) -> Embed:
        return Tokens(vocab=config["vocab_size"], position=Learned(count=config["max_position_embeddings"]))

    def embed_fields(self, embed: Embed, config: Config) -> Fields:
        embed = expect(embed, Tokens)
        return {"vocab_size": embed.vocab, "max_position_embeddings": expect(embed.position or embed, Learned).count}

    def embed_rules(self, spec: ModelSpec) -> list[Rule]:
        names = {"embed": "embeddings.token_embedding", "embed.position": "embeddings.position_embedding"}
        return same(names, ["weight"])


@dataclass(frozen=True, kw_only=True)
class ImageTower(Tower):
    """Patches with learned positions on a grid."""

    def embed(self, config: Config) -> Patches:
        return patches(config)

    def embed_fields(self, embed: Embed, config: Config) -> Fields:
        """The old size where it gives as many patches: it may have pixels beyond the last one."""
        spec = expect(embed, Patches)
        grid = expect(spec.position or spec, LearnedGrid)
        height, width = grid.rows * spec.patch, grid.columns * spec.patch
        old = tuple(side // spec.patch for side in sides(config)) == (grid.rows, grid.columns)
        size = config["image_size"] if old else height if height == width else [height, width]
        return {"image_size": size, "patch_size": spec.patch, "num_channels": spec.channels}

    def embed_rules(self, spec: ModelSpec) -> list[Rule]:
        return [
            *same({"embed.position": "embeddings.position_embedding"}, ["weight"]),
            *self.patch_rules(spec, "embeddings.patch_embedding"),
        ]

    def patch_rules(self, spec: ModelSpec, linear: str) -> list[Rule]:
        """The convolution ``linear`` on disk is the linear map of flattened patches."""
        embed = expect(spec.embed, Patches)
        side, channels = embed.patch, embed.channels
        flat = viewed((spec.width, channels, side, side), (spec.width, channels * side**2))
        return [Rule((f"{linear}.weight",), ("embed.linear.weight",), flat), Rule.same(f"{linear}.bias", "embed.linear.bias")]


def positions(embed: Embed) -> int:
    """How many learned positions a tower's embedding has."""
    if isinstance(embed, Tokens):
        return expect(embed.position or embed, Learned).count
    image = expect(embed, Patches)
    grid = expect(image.position or image, LearnedGrid)
    return image.prefix + grid.rows * grid.columns


def patches(config: Config, prefix: int = 1, antialias: bool = False) -> Patches:
    """After a class token. prefix: tokens before the patches that have a learned position."""
    patch = square(config["patch_size"], "patch_size")
    height, width = sides(config)
    grid = LearnedGrid(rows=height // patch, columns=width // patch, prefix=prefix, antialias=antialias)
    return Patches(patch=patch, channels=config["num_channels"], position=grid)


def sides(config: Config) -> tuple[int, int]:
    """Height and width of images."""
    size = config["image_size"]
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return height, width


def square(size: Any, word: str) -> int:
    """A side given once or twice. Raises ValueError where the sides differ."""
    sides = set(size) if isinstance(size, (list, tuple)) else {size}
    if len(sides) > 1:
        raise ValueError(f"{word} {list(size)} is not supported: the sides must be equal")
    return sides.pop()


def prefix_tokens(*counts: int) -> Op:
    """One tensor [1, count, M] on disk for each kind of token before the patches; ours has all of them, [tokens, M]."""

    def backward(tensors: list[Tensor]) -> list[Tensor]:
        return [part[None] for part in tensors[0].split(list(counts))]

    return Op(lambda tensors: [torch.cat([t.flatten(0, -2) for t in tensors])], backward)


def prefixed(rule: Rule, prefix: str) -> Rule:
    return dataclasses.replace(rule, theirs=tuple(f"{prefix}{name}" for name in rule.theirs))


def activation(config: Config) -> Any:
    word = config["hidden_act"]
    if word not in ACTIVATIONS:
        raise ValueError(f"hidden_act {word!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[word]


def activation_name(ours: str, old: str) -> str:
    """The config's old word where it means the same."""
    return old if ACTIVATIONS.get(old) == ours else next((theirs for theirs, mine in ACTIVATIONS.items() if mine == ours), ours)


def labels(config: Config) -> int:
    """How many classes, of which transformers writes nothing where there are two."""
    return len(config.get("id2label") or {}) or config.get("num_labels", 2)


def label_fields(count: int, config: Config) -> Fields:
    """The names that the config already has where they are as many, else numbered ones."""
    if labels(config) == count:
        return {}
    names = {str(i): f"LABEL_{i}" for i in range(count)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


def is_classifier(config: Config) -> bool:
    return any("ForImageClassification" in name for name in config.get("architectures") or [])
