"""The command line: the same words as the Python interface. The commands are in zoo.commands."""

from __future__ import annotations

import os
import sys

import typer

from zoo.commands import comparing, converting, declarations, hub, measuring, quantizing, recipe, running
from zoo.commands.options import with_home

app = typer.Typer(help="Models composed of swappable parts, quantized and judged.", no_args_is_help=True, add_completion=False,
                  pretty_exceptions_enable=False)  # fmt: skip

COMMANDS = {
    "pull": hub.pull,
    "push": hub.push,
    "list": declarations.list_parts,
    "show": declarations.show,
    "diff": declarations.diff_models,
    "compare": comparing.compare_models,
    "generate": running.generate,
    "quantize": quantizing.quantize_model,
    "convert": converting.convert_model,
    "eval": measuring.evaluate_model,
    "bench": measuring.bench,
    "classify": running.classify_images,
    "run": recipe.run_recipe,
}
for name, command in COMMANDS.items():
    app.command(name)(with_home(command))


def main() -> None:
    """Run a command. What goes wrong is one message and exit status 2 (1 for what nobody foresaw); ZOO_DEBUG=1 shows the traceback."""
    try:
        app()
    except Exception as e:
        if "ZOO_DEBUG" in os.environ:
            raise
        foreseen = isinstance(e, (ValueError, OSError, MemoryError))
        what = str(e) if foreseen else f"{type(e).__name__}: {e} (ZOO_DEBUG=1 shows where)"
        typer.secho(f"error: {what}", fg="red", err=True)
        sys.exit(2 if foreseen else 1)
