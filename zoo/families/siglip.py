"""SigLIP checkpoints, which hold an image and a text encoder, and classifiers made of the image encoder."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.components.contracts import Head
from zoo.components.head.classification import Classification
from zoo.components.registry import part
from zoo.families._composite import Composite
from zoo.families.siglip_vision_model import SigLIPVision
from zoo.family import Family

TOWERS = {
    "vision": {"model_type": "siglip_vision_model", "architectures": ["SiglipVisionModel"]},
    "text": {"model_type": "siglip_text_model", "architectures": ["SiglipTextModel"]},
}


@part(Family, "siglip", source="Zhai et al. 2023, arXiv:2303.15343; transformers SiglipModel (its towers), SiglipForImageClassification")
@dataclass(frozen=True, kw_only=True)
class SigLIP(Composite):
    """Classifiers look at the mean of the patches; the attention pooling's tensors are not used."""

    architecture = "SiglipForImageClassification"
    towers = TOWERS
    vision = SigLIPVision()
    ignored = rf"{SigLIPVision.ignored}|vision_model\.head\..*"

    def head(self, labels: int) -> Head:
        return Classification(labels=labels, pool="mean")
