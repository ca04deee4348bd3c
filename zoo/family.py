"""The contract of checkpoint families: what a config.json means, and which tensor is which."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from zoo.components import registry
from zoo.components.spec import Spec
from zoo.model import ModelSpec
from zoo.weights import Rule


@dataclass(frozen=True, kw_only=True)
class Family(Spec):
    """A family of checkpoints. Its part name is the ``model_type`` of config.json.

    architecture: what config.json calls the class that loads it. ignored: pattern of tensors that are in files but are no weights.
    """

    family: ClassVar[str] = "family"
    architecture: ClassVar[str] = ""
    ignored: ClassVar[str] = r"(?!)"

    @abstractmethod
    def read(self, config: Mapping[str, Any]) -> ModelSpec:
        """config.json -> spec. Raises KeyError for a field that must be there and ValueError for a value that is not supported."""

    @abstractmethod
    def write(self, spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        """spec -> config.json that transformers loads, over ``config``, whose other fields are kept.

        Raises ValueError, listing the places, for a spec that the family's code cannot run.
        """

    @abstractmethod
    def rules(self, spec: ModelSpec) -> list[Rule]:
        """The weight table; rules for tensors that the spec does not have are left out by the caller."""

    def ignores(self, name: str) -> bool:
        return re.fullmatch(self.ignored, name) is not None


def family_for(config: Mapping[str, Any], reference: str) -> Family:
    """The family that a config names. Raises ValueError listing the known ones."""
    word = str(config.get("model_type", "")).replace("-", "_")
    known = registry.names("family")
    if word not in known:
        raise ValueError(f"{reference}: model_type {config.get('model_type')!r} is not known; known: {', '.join(known)}")
    part = registry.get("family", word).spec
    assert issubclass(part, Family)
    return part()
