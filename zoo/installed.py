"""Which versions of libraries are installed."""

from __future__ import annotations

import importlib.metadata


def version(name: str) -> str | None:
    """Of a distribution by its name; None where it is not installed, as this one need not be to run from its folders."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
