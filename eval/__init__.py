"""Measurements of a model: accuracy, perplexity, speed, memory, and reports that compare them.

Everything is loaded on first use: ``from zoo.eval import perplexity, evaluate``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zoo.components.registry import nearest

if TYPE_CHECKING:
    from zoo.eval.environment import describe_environment
    from zoo.eval.footprint import Memory, PeakMemory, disk_bytes, memory, peak_memory
    from zoo.eval.harness import Evaluation, TaskResult, evaluate
    from zoo.eval.held_out import Perplexity, Protocol, perplexity
    from zoo.eval.images import image_accuracy
    from zoo.eval.parity import first_difference
    from zoo.eval.report import write_report
    from zoo.eval.results import load_results, save_results
    from zoo.eval.timing import Speed, compare_speed, speed

_LAZY = {
    "describe_environment": "environment",
    "Memory": "footprint",
    "PeakMemory": "footprint",
    "disk_bytes": "footprint",
    "memory": "footprint",
    "peak_memory": "footprint",
    "Evaluation": "harness",
    "TaskResult": "harness",
    "evaluate": "harness",
    "Perplexity": "held_out",
    "Protocol": "held_out",
    "perplexity": "held_out",
    "image_accuracy": "images",
    "first_difference": "parity",
    "write_report": "report",
    "load_results": "results",
    "save_results": "results",
    "Speed": "timing",
    "compare_speed": "timing",
    "speed": "timing",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'zoo.eval' has no attribute {name!r}{nearest(name, _LAZY)}")
    import importlib

    return getattr(importlib.import_module(f"zoo.eval.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_LAZY)
