"""Quantization: methods, statistics, disk formats and the runner that applies them to a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.quantize.cache_scales import calibrate_cache
    from zoo.quantize.report import Report
    from zoo.quantize.runner import quantize
    from zoo.verification import verify

_LAZY = {
    "calibrate_cache": "zoo.quantize.cache_scales",
    "quantize": "zoo.quantize.runner",
    "Report": "zoo.quantize.report",
    "verify": "zoo.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(_LAZY)
