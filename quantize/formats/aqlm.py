"""AQLM checkpoints: the layout of our own sums of code vectors, under the same names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.additive import Additive
from zoo.components.registry import part
from zoo.components.spec import TensorInfo, load
from zoo.formats import Format, check_tensors, words

PLACE = "quantization_config"
FIELDS = {"codebooks": "num_codebooks", "bits": "nbits_per_codebook", "group": "in_group_size", "outputs_per_group": "out_group_size"}
DEFAULTS = {"num_codebooks": 1, "nbits_per_codebook": 16, "in_group_size": 8, "out_group_size": 1}
KEPT = "linear_weights_not_to_quantize"


@part(Format, "aqlm", source="aqlm 1.1.7; Egiazarian et al. 2024, arXiv:2401.06118")
@dataclass(frozen=True, kw_only=True)
class AQLMFormat(Format):
    """``codes`` [rows, blocks, codebooks], ``codebooks`` and ``scales``; read by transformers with the package aqlm.

    All modules have the same numbers of codebooks, bits and group sizes, those in ``linear_weights_not_to_quantize`` are plain.
    """

    method = "aqlm"

    def storage(self, config: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> Additive | None:
        settings: dict[str, Any] = {}
        for ours, theirs in FIELDS.items():
            settings[ours] = config.get(theirs, DEFAULTS[theirs])
            if type(settings[ours]) is not int or settings[ours] < 1:
                raise ValueError(f"{PLACE}.{theirs} must be a positive number, it is {settings[ours]!r:.60}")
        kept = words(config, KEPT, PLACE)
        if module in kept or f"{module}.weight" in kept or (tensors and "codes" not in tensors):
            return None
        dtype = tensors.get("codebooks", TensorInfo((), "float16")).dtype
        return load(Additive, settings | {"scale_dtype": dtype}, PLACE)

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        return list(storage.tensors(1, 1, bias))

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        check_tensors(storage.tensors(inputs, outputs, "bias" in tensors), tensors, f"a weight of {[outputs, inputs]}")
        return dict(tensors)

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        return dict(tensors)

    def accepts(self, storage: Linear) -> list[str]:
        return [] if isinstance(storage, Additive) else [f"aqlm holds additive, not {storage.name}"]

    def config(self, storages: Mapping[str, Linear]) -> dict[str, Any]:
        """One set of numbers for all modules. Raises ValueError where they differ."""
        kinds = {s for s in storages.values() if isinstance(s, Additive)}
        if len(kinds) > 1:
            found = "; ".join(sorted(str(kind) for kind in kinds))
            raise ValueError(f"aqlm holds one kind of codebooks, the model has {found}; use the format native")
        kind, plain = kinds.pop(), [name for name, storage in storages.items() if not isinstance(storage, Additive)]
        numbers = {theirs: getattr(kind, ours) for ours, theirs in FIELDS.items()}
        # some readers compare names of modules, others names of weights
        return {"quant_method": self.method, **numbers, KEPT: [n for name in plain for n in (name, f"{name}.weight")]}
