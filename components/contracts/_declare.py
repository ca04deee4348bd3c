"""Makes a family of parts known: its parts are the modules of ``components/<family>/``."""

from __future__ import annotations

from zoo.components import registry


def declare(name: str, about: str) -> str:
    registry.declare(name, f"zoo.components.{name}", about)
    return name
