"""The project's own format: any storage under the names of its tensors in memory, with its spec in the config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.registry import part
from zoo.components.spec import TensorInfo, dump, load
from zoo.formats import Format, check_tensors, check_values, member

PLACE = "quantization_config"
VERSION = 1


@part(Format, "native", source="this project")
@dataclass(frozen=True, kw_only=True)
class Native(Format):
    """Any storage, rotated ones and lattices too; read by zoo alone.

    ``quantization_config`` has ``quant_method: modular-zoo``, ``version: 1``, ``linear``, the storage of most modules as a spec, and
    ``others``, the storages of the rest by name, ``dense`` for those that are not quantized.
    """

    method = "modular-zoo"
    own: ClassVar[bool] = True

    def storage(self, config: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> Linear | None:
        version, others = config.get("version"), member(config, "others", Mapping, {}, PLACE)
        if type(version) is not int or version != VERSION:
            raise ValueError(f"{PLACE}.version: {version!r:.60} is not supported; supported: {VERSION}")
        if module not in others and "linear" not in config:
            raise ValueError(f"{PLACE}.linear is missing; it says how {module} is stored")
        place, data = (f"others.{module}", others[module]) if module in others else ("linear", config["linear"])
        found = load(Linear, data, f"{PLACE}.{place}")
        return None if found.name == "dense" else found

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        return list(storage.tensors(1, 1, bias))

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        check_tensors(storage.tensors(inputs, outputs, "bias" in tensors), tensors, f"a weight of {[outputs, inputs]}")
        check_values(storage, tensors, {})
        return dict(tensors)

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        return dict(tensors)

    def accepts(self, storage: Linear) -> list[str]:
        return []

    def config(self, storages: Mapping[str, Linear]) -> dict[str, Any]:
        quantized = Counter(storage for storage in storages.values() if storage.name != "dense")
        usual = max(quantized, key=lambda storage: quantized[storage])
        others = {name: dump(storage) for name, storage in storages.items() if storage != usual}
        return {"quant_method": self.method, "version": VERSION, "linear": dump(usual), "others": others}
