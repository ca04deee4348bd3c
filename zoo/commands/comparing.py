"""``zoo compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from zoo.commands.options import Loading, ModelArgument, with_loading
from zoo.commands.output import console

if TYPE_CHECKING:
    from zoo.compare import Compared

OtherArgument = Annotated[str | None, typer.Argument(help="Another model of the zoo; by default transformers' model of the same folder.")]


@with_loading(dtype="float32")
def compare_models(loading: Loading, model: ModelArgument, other: OtherArgument = None,
                   other_quantized: Annotated[str, typer.Option(help="As --quantized, of the other model.")] = "keep",
                   tokens: Annotated[int, typer.Option(help="Random tokens to run.")] = 64,
                   tolerance: Annotated[float, typer.Option(help="Relative error that counts as equal.")] = 1e-5) -> None:  # fmt: skip
    """Run a model here and in transformers, or two models here, and show how far each module's output lies apart.

    --set edits the first model alone. Fails where a module differs by more than the tolerance.
    """
    from zoo.compare import check_folder, differences, random_ids, transformers_model

    if other is None and other_quantized != "keep":
        raise ValueError("--other-quantized is for another model of the zoo; name it after the first one")
    if other is None:
        check_folder(model)
    ours = loading.load(model)
    ids = random_ids(ours, tokens)
    theirs = replace(loading, set=None).load(other, quantized=other_quantized) if other else transformers_model(ours)
    rows = differences(ours, theirs, ids)
    if print_differences(rows, tolerance, "in transformers" if other is None else "in the other model"):
        raise typer.Exit(1)


def print_differences(rows: Sequence[Compared], tolerance: float, where: str) -> bool:
    """A row for each pair of modules, the first that differs marked. Returns whether any differs."""
    first = next((row for row in rows if not row.error <= tolerance), None)
    width = max((len(row.ours) for row in rows), default=0)
    lines = [f"{'error':>8}  {'module':{width}}  {where}"]
    for row in rows:
        lines.append(f"{row.error:8.1e}  {row.ours:{width}}  {row.theirs}{'  <- the first that differs' if row is first else ''}")
    differing = sum(not row.error <= tolerance for row in rows)
    lines.append(f"{differing} of {len(rows)} modules differ by more than {tolerance:g} of their largest value")
    console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return first is not None
