"""What commands print."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.saving import Saved


def console() -> Any:
    """A rich console; lines that do not go to a terminal are not folded."""
    from rich.console import Console

    return Console(soft_wrap=not sys.stdout.isatty())


def print_saved(saved: Saved) -> None:
    console().print(f"wrote {saved.folder}: {saved.bytes:,} bytes; read back before it was put there: tensors and logits are equal")
    if saved.transformers:
        console().print(f"transformers cannot load it: {saved.transformers}")
