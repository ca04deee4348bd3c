"""Where the bitsandbytes library can be used; it is imported when it is first asked for, which takes seconds."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

DEVICES = ("cpu", "cuda")


def unusable(device: torch.device) -> list[str]:
    """Reasons why its operators cannot be used on a device, as ``refuses`` gives them; where there are none, they are registered."""
    if device.type not in DEVICES:
        return [f"runs on {' and '.join(DEVICES)}, not on {device.type}"]
    return list(_missing())


@cache
def _missing() -> tuple[str, ...]:
    if importlib.util.find_spec("bitsandbytes") is None:
        return ("needs the library bitsandbytes, which is not installed",)
    from bitsandbytes.cextension import ErrorHandlerMockBNBNativeLibrary, lib

    return ("needs the library of bitsandbytes to load",) if isinstance(lib, ErrorHandlerMockBNBNativeLibrary) else ()
