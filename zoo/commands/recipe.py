"""``zoo run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zoo.commands.output import console


def run_recipe(recipe: Annotated[str, typer.Argument(help="A recipe file, or a built-in one by name.")],
               out: Annotated[Path, typer.Option(help="Folder for results.json, report.html and pareto.png.")],
               only: Annotated[list[str] | None, typer.Option(help="Only these variants, beside the baseline. Repeatable.")] = None,
               set: Annotated[list[str] | None, typer.Option("--set", help="Edit the recipe: path=value. Repeatable.")] = None,
               fresh: Annotated[bool, typer.Option(help="Run finished variants again.")] = False) -> None:  # fmt: skip
    """Run a recipe: quantize and measure every variant, write the report; a killed run continues when started again."""
    from zoo.recipes.recipe import read_recipe
    from zoo.recipes.runner import run, with_only

    wanted = read_recipe(recipe, *(set or ()))
    results = run(with_only(wanted, only) if only else wanted, out, console=console(), fresh=fresh)
    if any(v.error for v in results.variants):
        raise typer.Exit(1)
