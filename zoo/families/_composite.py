"""What checkpoints share that hold an image and a text encoder: each is read alone, a classifier needs the image encoder only."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from zoo.components.contracts import Head, Norm
from zoo.components.head.classification import Classification
from zoo.config_checks import MOST_LAYERS
from zoo.families._decoder import Config, Fields, same
from zoo.families._tower import ImageTower, is_classifier, label_fields, labels, prefixed
from zoo.family import Family, expect
from zoo.model import ModelSpec
from zoo.weights import Rule


@dataclass(frozen=True, kw_only=True)
class Composite(Family):
    """vision: the family of the image encoder. final_norm: a classifier's, where it is not the encoder's."""

    vision: ClassVar[ImageTower]
    final_norm: ClassVar[Norm | None] = None

    def read(self, config: Config) -> ModelSpec:
        if not is_classifier(config):
            raise ValueError(f"it describes {len(self.towers)} models; name one, as in REFERENCE#{' or REFERENCE#'.join(self.towers)}")
        encoder = {**self.vision.defaults, **(config.get("vision_config") or {})}
        if not 0 < encoder["num_hidden_layers"] <= MOST_LAYERS:
            raise ValueError(f"num_hidden_layers of vision_config is {encoder['num_hidden_layers']}")
        spec = self.vision.read(encoder)
        return dataclasses.replace(spec, head=self.head(labels(config)), norm=self.final_norm or spec.norm, checkpoint=self.name)

    @abstractmethod
    def head(self, labels: int) -> Head:
        """A classifier's head."""

    def fields(self, spec: ModelSpec, config: Config) -> Fields:
        old = config.get("vision_config") or {}
        count = expect(spec.head, Classification).labels
        alone = dataclasses.replace(spec, head=self.vision.read(old).head)
        encoder = {**old, **self.vision.fields(alone, old), "model_type": self.vision.name}
        return {"vision_config": encoder, **label_fields(count, config)}

    def rules(self, spec: ModelSpec) -> list[Rule]:
        alone = dataclasses.replace(spec, head=self.vision.read({}).head)
        return [prefixed(rule, self.vision.prefix) for rule in self.vision.rules(alone)] + same({"head.out": "classifier"})
