"""compressed-tensors: one config for many layouts, its schemes, each a file of this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.registry import part
from zoo.components.spec import TensorInfo, dump
from zoo.formats import Format, member, words
from zoo.quantize.formats.compressed_tensors._float_quantized import FloatQuantized
from zoo.quantize.formats.compressed_tensors._int_quantized import IntQuantized
from zoo.quantize.formats.compressed_tensors._matching import match
from zoo.quantize.formats.compressed_tensors._mx import MXFP4, MXFP6, MXFP8
from zoo.quantize.formats.compressed_tensors._nvfp4 import NVFP4
from zoo.quantize.formats.compressed_tensors._pack_quantized import PackQuantized
from zoo.quantize.formats.compressed_tensors._scheme import Scheme

PLACE = "quantization_config"
UNSUPPORTED = ("transform_config", "sparsity_config")
NO_SCHEME = "compressed-tensors has no scheme for {}"
MIXED = "mixed-precision"  # each group names its own format
# the first that holds a storage is written
SCHEMES: tuple[Scheme, ...] = (PackQuantized(), IntQuantized(), MXFP4(), MXFP6(), MXFP8(), NVFP4(), FloatQuantized())
BY_WORD = {word: scheme for scheme in SCHEMES for word in scheme.formats}


@part(Format, "compressed_tensors", source="compressed-tensors 0.20")
@dataclass(frozen=True, kw_only=True)
class CompressedTensors(Format):
    """Packed integers, integers of 8 bits with such inputs, FP8, NVFP4 and microscaled floats; read by transformers and vLLM."""

    method = "compressed-tensors"

    def storage(self, config: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> Linear | None:
        problems = [f"{PLACE}.{field} is not supported" for field in UNSUPPORTED if config.get(field) not in (None, {})]
        if problems:
            raise ValueError("; ".join(problems))
        ignored = words(config, "ignore", PLACE)
        groups = member(config, "config_groups", Mapping, {}, PLACE)
        if not groups:
            raise ValueError(f"{PLACE}.config_groups is missing or empty; it says how the weights are quantized")
        targets = {target: name for name, group in groups.items() for target in _targets(name, group)}
        if match(module, ignored, f"{PLACE}.ignore") is not None:
            return None
        found = match(module, targets, f"{PLACE}.config_groups")
        if found is None:
            return None
        group, place = groups[targets[found]], f"{PLACE}.config_groups.{targets[found]}"
        format = config.get("format") if group.get("format") is None else group["format"]
        return _scheme(format, place).storage(group, place, tensors)

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        return _scheme_of(storage).disk_names(storage, bias)

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        return _scheme_of(storage).decode(storage, tensors, inputs, outputs)

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        return _scheme_of(storage).encode(storage, tensors, inputs, outputs)

    def accepts(self, storage: Linear) -> list[str]:
        scheme = next((scheme for scheme in SCHEMES if scheme.holds(storage)), None)
        return [NO_SCHEME.format(dump(storage))] if scheme is None else scheme.refuses(storage)

    def config(self, storages: Mapping[str, Linear]) -> dict[str, Any]:
        """One group per kind of storage. The most frequent one targets all linears, the others name their modules."""
        kinds: list[tuple[dict[str, Any], list[str]]] = []
        for name, storage in storages.items():
            if any(scheme.holds(storage) for scheme in SCHEMES):
                _names_of(_scheme_of(storage).group(storage), kinds).append(name)
        kinds.sort(key=lambda kind: len(kind[1]))
        groups = {
            f"group_{i}": {"targets": ["Linear"] if i == len(kinds) - 1 else names, **group, "output_activations": None}
            for i, (group, names) in enumerate(kinds)
        }
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": self.method,
            "format": formats.pop() if len(formats) == 1 else MIXED,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [name for name, storage in storages.items() if not any(scheme.holds(storage) for scheme in SCHEMES)],
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def _names_of(group: dict[str, Any], kinds: list[tuple[dict[str, Any], list[str]]]) -> list[str]:
    """The names of a kind, which is entered where it is new."""
    for known, names in kinds:
        if known == group:
            return names
    kinds.append((group, []))
    return kinds[-1][1]


def _targets(name: str, group: Any) -> list[str]:
    if not isinstance(group, Mapping):
        raise ValueError(f"{PLACE}.config_groups.{name} is a preset; write the scheme out")
    return words(group, "targets", f"{PLACE}.config_groups.{name}")


def _scheme(format: Any, place: str) -> Scheme:
    if not isinstance(format, str) or format not in BY_WORD:
        raise ValueError(f"{place}.format: {format!r:.60} is not supported; supported: {', '.join(BY_WORD)}")
    return BY_WORD[format]


def _scheme_of(storage: Linear) -> Scheme:
    found = next((scheme for scheme in SCHEMES if scheme.holds(storage)), None)
    if found is None:
        raise ValueError(NO_SCHEME.format(dump(storage)))
    return found
