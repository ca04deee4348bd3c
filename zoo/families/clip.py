"""CLIP checkpoints, which hold an image and a text encoder, and classifiers made of the image encoder."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Head
from zoo.components.head.classification import Classification
from zoo.components.norm.identity import Identity
from zoo.components.registry import part
from zoo.families import clip_text_model, clip_vision_model
from zoo.families._composite import Composite
from zoo.families.clip_vision_model import CLIPVision
from zoo.family import Family

TOWERS = {
    "vision": {"model_type": "clip_vision_model", "architectures": [clip_vision_model.PROJECTED]},
    "text": {"model_type": "clip_text_model", "architectures": [clip_text_model.PROJECTED]},
}


@part(Family, "clip", source="Radford et al. 2021, arXiv:2103.00020; transformers CLIPModel (its towers), CLIPForImageClassification")
@dataclass(frozen=True, kw_only=True)
class CLIP(Composite):
    """Classifiers look at the mean of the patches as the last layer leaves them, so the final norm's tensors are not used."""

    architecture = "CLIPForImageClassification"
    towers = TOWERS
    vision = CLIPVision()
    ignored = rf"{CLIPVision.ignored}|vision_model\.post_layernorm\..*"
    final_norm = Identity()

    def head(self, labels: int) -> Head:
        return Classification(labels=labels, pool="mean", skip=1)
