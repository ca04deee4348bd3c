"""Models that no published config can describe: the spec itself is in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zoo.components import registry
from zoo.components.registry import part
from zoo.components.spec import SpecError, dump, load
from zoo.family import Family
from zoo.model import ModelSpec
from zoo.weights import Rule


@part(Family, "zoo", source="this project")
@dataclass(frozen=True, kw_only=True)
class Zoo(Family):
    """A spec in config.json under ``zoo_spec``; tensors have the names of the family that the spec's ``checkpoint`` field names."""

    architecture = ""

    def read(self, config: Mapping[str, Any]) -> ModelSpec:
        spec = load(ModelSpec, config["zoo_spec"], "zoo_spec")
        known = [name for name in registry.names("family") if name != self.name]
        if spec.checkpoint not in known:
            near = registry.nearest(spec.checkpoint, known)
            raise SpecError([f"zoo_spec.checkpoint: {spec.checkpoint!r:.60} is no family that names tensors{near}"])
        return spec

    def fields(self, spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"zoo_spec": dump(spec)}

    def rules(self, spec: ModelSpec) -> list[Rule]:
        family = registry.get("family", spec.checkpoint).spec()
        assert isinstance(family, Family)
        return family.rules(spec)
