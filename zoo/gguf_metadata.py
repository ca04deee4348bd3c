"""A model's declaration as the metadata of a GGUF file: the way back from zoo.gguf_architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zoo.checkpoint import CheckpointError
from zoo.components.ops.rotary import frequencies
from zoo.components.rope_scaling.llama3 import Llama3
from zoo.components.spec import compact, diff
from zoo.family import Family, architecture, family_for
from zoo.gguf_architectures import ARCHITECTURES, DIVISORS, Described, Fields
from zoo.model import ModelSpec

KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "vocab_size": "vocab_size",
}
SCALING = {"factor": "factor", "original_max_position_embeddings": "original_context_length", "beta_fast": "yarn_beta_fast",
           "beta_slow": "yarn_beta_slow"}  # fmt: skip
SCALED = ("linear", "yarn")  # rope types that are said by keys alone


class Planned(Described):
    """A file that is still to be written. shapes: of its weights, by their names in the file. consumed: tensors that are settings."""

    def __init__(self, name: str, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], consumed: Mapping[str, Tensor]):
        self.architecture, self.metadata, self.reference = name, metadata, "the GGUF file to be written"
        self._shapes, self.consumed = shapes, consumed

    def has(self, tensor: str) -> bool:
        return tensor in self._shapes or tensor in self.consumed

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._shapes[tensor]

    def values(self, tensor: str) -> Tensor:
        return self.consumed[tensor]


def architecture_name(family: Family) -> str:
    """GGUF's name for a family. Raises ValueError listing those that have one."""
    names = {kind.model_type: name for name, kind in ARCHITECTURES.items()}
    if family.name not in names:
        raise ValueError(f"no GGUF file holds a {family.name} model here; known: {', '.join(sorted(names))}")
    return names[family.name]


def plan(spec: ModelSpec, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> Planned:
    """The metadata of a model, less the tokenizer. Raises ValueError where the file would not say all of the model when read again."""
    name = architecture_name(family)
    try:
        config = family.write(spec, {})
        planned = Planned(name, *metadata(name, config, shapes))
        read = family_for(found := ARCHITECTURES[name].config(planned), planned.reference).read(found)
    except CheckpointError as e:
        raise ValueError(f"{name} models are not written as GGUF: {e}") from None
    rows = compact(diff(architecture(read), architecture(spec)))
    if rows:
        lost = "; ".join(f"{path} is {have} where it would say {says}" for path, says, have in rows)
        raise ValueError(f"a GGUF file of a {name} model cannot say all of this one: {lost}; save it as a folder")
    return planned


def metadata(name: str, config: Fields, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Fields, Mapping[str, Any], dict[str, Tensor]]:
    """Keys of a config.json in its older spelling, the shapes, and the tensors that are settings."""
    word, epsilon = ARCHITECTURES[name].epsilon
    theta, width = float(config["rope_theta"]), int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    found = {key: config[ours] for key, ours in KEYS.items()} | {epsilon: float(config[word])}
    found |= {"rope.freq_base": theta, "rope.dimension_count": width}
    scaling: Mapping[str, Any] = config.get("rope_scaling") or {}
    consumed: dict[str, Tensor] = {}
    kind = scaling.get("rope_type")
    if kind == "llama3":
        consumed[DIVISORS] = divisors(scaling, theta, width)
    elif kind in SCALED:
        found["rope.scaling.type"] = kind
        found |= {f"rope.scaling.{key}": scaling[ours] for ours, key in SCALING.items() if ours in scaling}
    elif kind is not None:
        raise ValueError(f"rope scaling {kind} is not written as GGUF; supported: llama3, {', '.join(SCALED)}")
    return {f"{name}.{key}": value for key, value in found.items()}, shapes, consumed


def divisors(scaling: Mapping[str, Any], theta: float, width: int) -> Tensor:
    """What llama.cpp divides the frequencies by, float32 [width / 2], for Llama 3's scaling."""
    words = {word: scaling[word] for word in ("factor", "low_freq_factor", "high_freq_factor")}
    scaled = Llama3(**words, context=scaling["original_max_position_embeddings"]).frequencies(theta, width, None)
    return (frequencies(theta, width) / scaled).to(torch.float32)
