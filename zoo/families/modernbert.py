"""ModernBERT."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zoo.components.contracts import MLP, Embed, Head, Norm, Pattern, Position
from zoo.components.embed.tokens import Tokens
from zoo.components.head.classification import Classification
from zoo.components.head.hidden import Hidden
from zoo.components.head.masked_lm import MaskedLM
from zoo.components.norm.layer import Layer
from zoo.components.pattern.full import Full
from zoo.components.pattern.nearby import Nearby
from zoo.components.position.rope import Rope
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.registry import part
from zoo.components.wiring.pre_mlp import PreMLP
from zoo.families._classic import fused
from zoo.families._decoder import FULL, SLIDING, Config, Decoder, Fields, activation, activation_name
from zoo.families._encoder import Encoder
from zoo.families._rope import read_rope, write_ropes
from zoo.families._tower import labels
from zoo.family import Family, expect
from zoo.layouts import split_evenly
from zoo.model import LayerSpec, ModelSpec
from zoo.weights import Op, Rule

HEAD = {"head.hidden": "head.dense", "head.norm": "head.norm"}


@part(Family, "modernbert", source="Warner et al. 2024, arXiv:2412.13663; transformers ModernBertModel and its task classes")
@dataclass(frozen=True, kw_only=True)
class ModernBert(Encoder):
    """Pre-norm encoder with rotary positions and a gated MLP; two layers of three see their neighbours only and turn faster.

    The first layer has no norm before attention.
    """

    architecture, stem, prefix = "ModernBertModel", "ModernBert", "model."
    table, beside, final_norm = "embeddings.tok_embeddings", {"embed.norm": "embeddings.norm"}, "final_norm"
    modules = {"mixer.projection.o": "attn.Wo", "mixer_norm": "attn_norm", "mlp.down": "mlp.Wo", "mlp_norm": "mlp_norm"}
    fused = "attn.Wqkv"
    biases = {"qkv": "attention_bias", "out": "attention_bias", "mlp": "mlp_bias"}
    activation_key, norm_key = "hidden_activation", "norm_eps"
    defaults = {"hidden_activation": "gelu", "tie_word_embeddings": True, "local_attention": 128, "classifier_activation": "gelu",
                "classifier_bias": False, "classifier_pooling": "cls", "decoder_bias": True, "norm_bias": False,
                "max_position_embeddings": 8192, "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0,
                "global_attn_every_n_layers": 3}  # fmt: skip
    tables = {
        "masked_lm": {**HEAD, "head.out": "decoder"},
        "classification": {**HEAD, "head.out": "classifier"},
    }
    unread = ("head", "decoder", "classifier")

    # ---- config.json -> spec

    def settled(self, config: Config) -> Config:
        """With the type and the rotary settings of each layer as newer files have them."""
        config = super().settled(config)
        held, scaling, period = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}, config["global_attn_every_n_layers"]
        thetas = {FULL: config["global_rope_theta"], SLIDING: config["local_rope_theta"]}
        ropes = {kind: {"rope_theta": theta, **scaling, **(held.get(kind) or {})} for kind, theta in thetas.items()}
        types = config.get("layer_types") or [SLIDING if l % period else FULL for l in range(config["num_hidden_layers"])]
        return {**config, "layer_types": types, "rope_parameters": ropes, "rope_scaling": None}

    def layer(self, config: Config, l: int) -> LayerSpec:
        usual = super().layer(config, l)
        return usual if l else replace(usual, wiring=PreMLP())

    def embed(self, config: Config) -> Embed:
        return Tokens(vocab=config["vocab_size"], norm=self.norm(config))

    def position(self, config: Config, l: int) -> Position:
        return read_rope(config, self.heads(config)["head_dim"], config["layer_types"][l])

    def pattern(self, config: Config, l: int) -> Pattern:
        return Nearby(reach=config["local_attention"] // 2) if config["layer_types"][l] == SLIDING else Full()

    def mlp(self, config: Config, l: int) -> MLP:
        return Decoder.mlp(self, config, l)

    def norm(self, config: Config) -> Norm:
        return Layer(eps=config.get("norm_eps", 1e-5), bias=config["norm_bias"])

    def masked_lm(self, config: Config) -> MaskedLM:
        return MaskedLM(tied=config["tie_word_embeddings"], bias=config["decoder_bias"], norm=self.norm(config),
                        activation=activation(config, "classifier_activation"), hidden_bias=config["classifier_bias"])  # fmt: skip

    def classification(self, config: Config) -> Classification:
        return Classification(labels=labels(config), pool="mean" if config["classifier_pooling"] == "mean" else "first",
                              norm=self.norm(config), dense=activation(config, "classifier_activation"),
                              dense_bias=config["classifier_bias"])  # fmt: skip

    def hidden(self, config: Config) -> Hidden:
        return Hidden()

    # ---- spec -> config.json

    def position_fields(self, spec: ModelSpec, config: Config) -> Fields:
        ropes = {kind(layer): expect(layer.mixer.position, Rope) for layer in spec.layers}
        return write_ropes(ropes, config, spec.layers[0].mixer.projection.rotary_width)

    def pattern_fields(self, spec: ModelSpec, config: Config) -> Fields:
        near = [p.reach for p in (layer.mixer.pattern for layer in spec.layers) if isinstance(p, Nearby)]
        return {"layer_types": [kind(layer) for layer in spec.layers], **({"local_attention": 2 * near[0]} if near else {})}

    def mlp_fields(self, mlp: MLP) -> Fields:
        return Decoder.mlp_fields(self, mlp)

    def norm_fields(self, norm: Norm) -> Fields:
        return {"norm_eps": expect(norm, Layer).eps, "norm_bias": expect(norm, Layer).bias}

    def head_fields(self, head: Head) -> Fields:
        if isinstance(head, MaskedLM):
            words = {"classifier_activation": activation_name(head.activation), "classifier_bias": head.hidden_bias}
            return super().head_fields(head) | words | {"decoder_bias": head.bias}
        if isinstance(head, Classification):
            words = {"classifier_activation": activation_name(head.dense or "identity"), "classifier_bias": bool(head.dense_bias)}
            return {"classifier_pooling": "mean" if head.pool == "mean" else "cls", **words}
        return {}

    # ---- names

    def cut(self, projection: GroupedQuery) -> Op:
        return split_evenly(3)

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        gated = fused(f"{self.layer_prefix}mlp.Wi", ["layers.{l}.mlp.gate", "layers.{l}.mlp.up"], split_evenly(2))
        return [*super().layer_rules(spec), *gated]


def kind(layer: LayerSpec) -> str:
    """The type of a layer, as ``layer_types`` calls it."""
    return SLIDING if isinstance(layer.mixer.pattern, Nearby) else FULL
