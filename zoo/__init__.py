"""Modular zoo: models composed of swappable parts, quantized and judged.

Everything here is loaded on first use; ``import zoo`` itself imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zoo.components import registry

if TYPE_CHECKING:
    from zoo.components.spec import SpecError, diff, override
    from zoo.conversion import convert
    from zoo.declare import build, parts, spec
    from zoo.embedding import embed
    from zoo.generation import complete, generate, stream
    from zoo.loading import load
    from zoo.model import Model, ModelSpec
    from zoo.sampling import Sampling
    from zoo.saving import save

__version__ = "0.1.0"

registry.declare("family", "zoo.families", "how a checkpoint's config and names map to a spec")
registry.declare("packed_matmul", "zoo.components.ops.packed_matmul", "how weights of few bits are held in memory and multiplied")
registry.declare("float_matmul", "zoo.components.ops.float_matmul", "how weights that are few-bit floats are multiplied")
registry.declare("block_matmul", "zoo.components.ops.block_matmul", "how weights of 4-bit codes in blocks are multiplied")
registry.declare("int8_matmul", "zoo.components.ops.int8_matmul", "how integers of 8 bits are multiplied by each other")
registry.declare("outlier_matmul", "zoo.components.ops.outlier_matmul", "how LLM.int8 multiplies outlier columns and the rest")
registry.declare("quantizer", "zoo.quantize.methods", "how weights are rounded to few bits")
registry.declare("transform", "zoo.quantize.transforms", "what is done to weights before they are rounded, their function kept")
registry.declare("conversion", "zoo.conversions", "how one kind of part becomes another, weights included")
registry.declare("format", "zoo.quantize.formats", "how quantized weights lie on disk")

_LAZY = {
    "load": "zoo.loading:load",
    "save": "zoo.saving:save",
    "spec": "zoo.declare:spec",
    "build": "zoo.declare:build",
    "parts": "zoo.declare:parts",
    "diff": "zoo.components.spec:diff",
    "embed": "zoo.embedding:embed",
    "override": "zoo.components.spec:override",
    "generate": "zoo.generation:generate",
    "stream": "zoo.generation:stream",
    "complete": "zoo.generation:complete",
    "Sampling": "zoo.sampling:Sampling",
    "convert": "zoo.conversion:convert",
    "Model": "zoo.model:Model",
    "ModelSpec": "zoo.model:ModelSpec",
    "SpecError": "zoo.components.spec:SpecError",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}{registry.nearest(name, _LAZY)}")
    import importlib

    module, _, attribute = _LAZY[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*_LAZY, "__version__"])
