"""DINOv2: image encoders trained without labels, and linear classifiers on them."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import MLP, Head, Wiring
from zoo.components.head.classification import Classification
from zoo.components.head.pooling import Pooling
from zoo.components.mlp.gated import Gated
from zoo.components.mlp.plain import Plain
from zoo.components.registry import part
from zoo.components.wiring.pre import Pre
from zoo.families._decoder import Config, Fields, same
from zoo.families._tower import activation, activation_name, is_classifier, labels
from zoo.families.vit import ATTENTION, ViT
from zoo.family import Family, expect
from zoo.layouts import split_evenly
from zoo.model import ModelSpec
from zoo.weights import Rule

MODULES = {**ATTENTION, "mixer_norm": "norm1", "mlp_norm": "norm2"}
DEFAULTS = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "mlp_ratio": 4, "hidden_act": "gelu",
            "layer_norm_eps": 1e-6, "image_size": 224, "patch_size": 14, "num_channels": 3, "qkv_bias": True,
            "layerscale_value": 1.0, "use_swiglu_ffn": False}  # fmt: skip


@part(Family, "dinov2", source="Oquab et al. 2023, arXiv:2304.07193; transformers Dinov2ForImageClassification, Dinov2Model")
@dataclass(frozen=True, kw_only=True)
class DINOv2(ViT):
    """ViT with a learned scale on each branch and, in the largest size, a gated MLP. Classifiers see class token and mean patch."""

    architecture = "Dinov2ForImageClassification"
    encoder = "Dinov2Model"
    prefix = "dinov2."
    modules = MODULES
    defaults = DEFAULTS

    def mlp(self, config: Config) -> MLP:
        if config["use_swiglu_ffn"]:
            return Gated(hidden=gated_width(config["hidden_size"], config["mlp_ratio"]), bias=True)
        return Plain(hidden=int(config["hidden_size"] * config["mlp_ratio"]), activation=activation(config))

    def mlp_fields(self, mlp: MLP, config: Config) -> Fields:
        """The ratio is a whole number, so other widths than it gives are refused when the fields are read back."""
        width = config["hidden_size"]
        if isinstance(mlp, Gated):
            return {"use_swiglu_ffn": True, "mlp_ratio": round(mlp.hidden * 1.5 / width)}
        mlp = expect(mlp, Plain)
        word = activation_name(mlp.activation, config["hidden_act"])
        return {"use_swiglu_ffn": False, "mlp_ratio": mlp.hidden // width, "hidden_act": word}

    def fields(self, spec: ModelSpec, config: Config) -> Fields:
        return super().fields(spec, {**config, "hidden_size": spec.width})

    def wiring(self, config: Config) -> Wiring:
        return Pre(layer_scale=config["layerscale_value"])

    def wiring_fields(self, wiring: Wiring) -> Fields:
        start = expect(wiring, Pre).layer_scale
        if start is None:
            raise ValueError("the config can only say layers with a layer_scale")
        return {"layerscale_value": start}

    def head(self, config: Config) -> Head:
        if not is_classifier(config):
            return Pooling(pool="first")
        return Classification(labels=labels(config), pool="first_mean", skip=self.embed(config).prefix)

    def head_fields(self, head: Head, config: Config) -> Fields:
        return {} if isinstance(head, Pooling) else super().head_fields(head, config)

    def layer_rules(self, spec: ModelSpec) -> list[Rule]:
        at = f"{self.layers}.{{l}}."
        scales = {"mixer_scale": "layer_scale1", "mlp_scale": "layer_scale2"}
        gated = isinstance(spec.layers[0].mlp, Gated)
        return [
            *super().layer_rules(spec),
            *(Rule.same(f"{at}{theirs}.lambda1", f"layers.{{l}}.{ours}.weight") for ours, theirs in scales.items()),
            *(gated_rules(at) if gated else same({"layers.{l}.mlp.up": f"{at}mlp.fc1", "layers.{l}.mlp.down": f"{at}mlp.fc2"})),
        ]


def gated_width(width: int, ratio: int) -> int:
    """Two thirds of a plain MLP's width, rounded up to a multiple of 8."""
    return (int(int(width * ratio) * 2 / 3) + 7) // 8 * 8


def gated_rules(at: str) -> list[Rule]:
    """Gate and up projection are one matrix on disk."""
    fused = [Rule((f"{at}mlp.weights_in.{leaf}",), (f"layers.{{l}}.mlp.gate.{leaf}", f"layers.{{l}}.mlp.up.{leaf}"), split_evenly(2))
             for leaf in ("weight", "bias")]  # fmt: skip
    return fused + same({"layers.{l}.mlp.down": f"{at}mlp.weights_out"})
