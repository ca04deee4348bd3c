"""What of a config.json is refused before a spec is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zoo.components.spec import TensorInfo
from zoo.family import Family
from zoo.model import ModelSpec

MOST_LAYERS, MOST_EXPERTS = 2_000, 50_000  # of a model
PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
FLAGS = {
    "true": "true",
    "false": "false",
    "yes": "true",
    "no": "false",
    "1": "true or 1",
    "0": "false or 0",
}  # texts where no text is meant


def check_config(family: Family, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> None:
    """Raise ValueError for what would be misread in silence, or cost a long time, before a spec is made of it.

    That is, in config.json and in the objects inside it: numbers of layers that the files cannot hold, lists that leave layers out, and
    words where true or false is meant.
    """
    most = MOST_LAYERS if tensors is None else min(MOST_LAYERS, sum(1 for t in tensors.values() if math.prod(t.shape)))
    words = dict.fromkeys((family.spelling.get("num_hidden_layers", "num_hidden_layers"), "num_hidden_layers"))
    for place, section in sections(config):
        for key in (k for k, value in section.items() if isinstance(value, str) and value.lower() in FLAGS and k != "_name_or_path"):
            raise ValueError(f"{place}{key} is the text {section[key]!r}; write {FLAGS[section[key].lower()]} without quotes")
        for word in (w for w in words if isinstance(section.get(w), int)):
            layers = section[word]
            if not 0 < layers <= most:
                why = "" if tensors is None else f"; the files have {len(tensors)} tensors, each layer needs one that holds values"
                raise ValueError(f"{place}{word} is {layers}, it must lie in 1..{most}{why}")
            for key in (k for k in PER_LAYER if section.get(k)):
                if not isinstance(section[key], Sequence) or isinstance(section[key], str) or len(section[key]) < layers:
                    raise ValueError(f"{place}{key} must be a list of an entry for each of {layers} layers, it is {section[key]!r:.80}")


def sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """config.json and the objects in it, each with the place before its fields' names; labels are free text and left out."""
    yield "", config
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in ("id2label", "label2id", "zoo_spec"):
            yield f"{key}.", value


def check_experts(spec: ModelSpec, tensors: Mapping[str, TensorInfo] | None) -> None:
    """Raise ValueError for more experts than the files can hold: each has a row of the width, of which an element packs at most 32."""
    counts = [len(getattr(layer.mlp, "experts", ())) for layer in spec.layers]
    values = math.inf if tensors is None else sum(math.prod(t.shape) for t in tensors.values())
    if sum(counts) > MOST_EXPERTS:
        raise ValueError(f"the layers have {sum(counts):,} experts together, a model has at most {MOST_EXPERTS:,}")
    if isinstance(spec.width, int) and sum(counts) * spec.width > 32 * values:
        raise ValueError(f"{sum(counts):,} experts of width {spec.width} are more than the files can hold, which have {values:,} values")
