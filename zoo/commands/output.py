"""What commands print."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.saving import Saved
    from zoo.verification import Verified


def console() -> Any:
    """A rich console; lines that do not go to a terminal are not folded."""
    from rich.console import Console

    return Console(soft_wrap=not sys.stdout.isatty())


def print_saved(saved: Saved) -> None:
    console().print(f"wrote {saved.folder}: {saved.bytes:,} bytes; {_compared(saved.verified)}")
    if saved.transformers:
        console().print(f"transformers cannot load it: {saved.transformers}")


def _compared(verified: Verified | None) -> str:
    if verified is None:
        return "it was not compared with the model in memory"
    logits = f"and logits differ by {verified.logit_difference:.1e} of the largest" if verified.logit_difference else "and logits are equal"
    odd = f"; {verified.not_finite:.1%} of the logits are NaN or infinite, as values of the model's own checkpoint are, and not compared"
    return f"read back before it was put there: tensors {logits}{odd * (verified.not_finite > 0)}"
