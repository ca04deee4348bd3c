"""Checkpoints with experts in MXFP4 as gpt-oss publishes them (``quant_method: mxfp4``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.packed_float import PackedFloat
from zoo.components.registry import part
from zoo.components.spec import TensorInfo, dump
from zoo.formats import Format, check_tensors
from zoo.weights import folded

GROUP, BYTES = 32, 16  # weights of a block, and what their codes take
KEPT = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")  # in the words of published files
STORAGE = PackedFloat(element="e2m1", group_size=GROUP, scale="e8m0")


@part(Format, "mxfp4", source="OpenAI 2025 (gpt-oss), arXiv:2508.10925; transformers Mxfp4Config")
@dataclass(frozen=True, kw_only=True)
class MXFP4(Format):
    """Experts as ``NAME_blocks`` uint8 [experts, outputs, inputs / 32, 16] and ``NAME_scales`` uint8 [experts, outputs, inputs / 32].

    The even weights lie in the low halves of the bytes, scales are exponents plus 127. Which layers' experts are packed is told by the
    tensors in the files; nothing else is ever packed.
    """

    method = "mxfp4"
    together = True
    joint = "_"

    def storage(self, config: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> PackedFloat | None:
        return STORAGE if "blocks" in tensors else None

    def disk_names(self, storage: Linear, bias: bool) -> list[str]:
        return ["blocks", "scales"]

    def decode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        grid = (outputs, inputs // GROUP)
        infos = {"blocks": TensorInfo((*grid, BYTES), "uint8"), "scales": TensorInfo(grid, "uint8")}
        check_tensors(infos, tensors, f"an expert's weight of {[outputs, inputs]}")
        return {"packed": tensors["blocks"].flatten(1), "scale": tensors["scales"]}

    def encode(self, storage: Linear, tensors: Mapping[str, Tensor], inputs: int, outputs: int) -> dict[str, Tensor]:
        return {"blocks": tensors["packed"].unflatten(1, (-1, BYTES)), "scales": tensors["scale"]}

    def accepts(self, storage: Linear) -> list[str]:
        if isinstance(storage, PackedFloat) and replace(storage, matmul=None) == STORAGE:
            return []
        return [f"mxfp4 holds E2M1 in groups of {GROUP} with scales of E8M0, not {dump(storage)}; quantize with mxfp and its defaults"]

    def config(self, storages: Mapping[str, Linear]) -> dict[str, Any]:
        """Raises ValueError where only some of a layer's experts' weights are packed, which transformers cannot read."""
        packed = {_owner(name) for name, storage in storages.items() if storage.name != "dense"}
        plain = [name for name, storage in storages.items() if storage.name == "dense"]
        half = [name for name in plain if _owner(name) in packed]
        if half:
            raise ValueError(f"mxfp4 holds all weights of a layer's experts or none, but {folded(half)} would be plain; pack these too")
        more = [_owner(name) for name in plain if not any(fnmatchcase(f"{name}.", f"{kept}.*") for kept in KEPT)]
        return {"quant_method": self.method, "modules_to_not_convert": [*KEPT, *dict.fromkeys(more)]}


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
