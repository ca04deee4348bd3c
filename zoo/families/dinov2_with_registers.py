"""DINOv2 with register tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from zoo.components.contracts import Embed
from zoo.components.embed.patches import Patches
from zoo.components.registry import part
from zoo.families import dinov2
from zoo.families._decoder import Config, Fields
from zoo.families._tower import patches
from zoo.families.dinov2 import DINOv2
from zoo.family import Family, expect

DEFAULTS = {**dinov2.DEFAULTS, "patch_size": 16, "num_register_tokens": 4}


@part(
    Family,
    "dinov2_with_registers",
    source="Darcet et al. 2023, arXiv:2309.16588; transformers Dinov2WithRegistersForImageClassification, Dinov2WithRegistersModel",
)
@dataclass(frozen=True, kw_only=True)
class DINOv2WithRegisters(DINOv2):
    """Registers stand between class token and patches and have no position; positions are smoothed before they shrink."""

    architecture = "Dinov2WithRegistersForImageClassification"
    encoder = "Dinov2WithRegistersModel"
    prefix = "dinov2_with_registers."
    defaults = DEFAULTS

    def embed(self, config: Config) -> Patches:
        return dataclasses.replace(patches(config, antialias=True), registers=config["num_register_tokens"])

    def embed_fields(self, embed: Embed, config: Config) -> Fields:
        return {**super().embed_fields(embed, config), "num_register_tokens": expect(embed, Patches).registers}
