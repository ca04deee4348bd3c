"""DeiT: ViT with a second token, trained by a teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from zoo.components.contracts import Head
from zoo.components.embed.patches import Patches
from zoo.components.head.distilled import Distilled
from zoo.components.registry import part
from zoo.families._decoder import Config, Fields
from zoo.families._tower import label_fields, labels, patches
from zoo.families.vit import ViT
from zoo.family import Family
from zoo.model import ModelSpec

TAUGHT = "DeiTForImageClassificationWithTeacher"


@part(Family, "deit", source="Touvron et al. 2020, arXiv:2012.12877; transformers DeiTForImageClassification, ...WithTeacher, DeiTModel")
@dataclass(frozen=True, kw_only=True)
class DeiT(ViT):
    """The distillation token is a register that has a learned position; with a teacher's head its classifier counts as much."""

    architecture = "DeiTForImageClassification"
    encoder = "DeiTModel"
    prefix = "deit."

    def loader(self, spec: ModelSpec) -> str:
        return TAUGHT if isinstance(spec.head, Distilled) else super().loader(spec)

    def embed(self, config: Config) -> Patches:
        return dataclasses.replace(patches(config, prefix=2), registers=1)

    def tokens(self, embed: Patches) -> Mapping[str, int]:
        return {"cls_token": 1, "distillation_token": 1}

    def head(self, config: Config) -> Head:
        return Distilled(labels=labels(config)) if TAUGHT in (config.get("architectures") or []) else super().head(config)

    def head_fields(self, head: Head, config: Config) -> Fields:
        return label_fields(head.labels, config) if isinstance(head, Distilled) else super().head_fields(head, config)

    def outer(self, head: Head) -> dict[str, str]:
        taught = {"head.out": "cls_classifier", "head.taught": "distillation_classifier"}
        return taught if isinstance(head, Distilled) else super().outer(head)
