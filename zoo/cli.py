"""The command line: the same words as the Python interface."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

app = typer.Typer(help="Models composed of swappable parts, quantized and judged.", no_args_is_help=True, add_completion=False,
                  pretty_exceptions_enable=False)  # fmt: skip

ModelArgument = Annotated[
    str, typer.Argument(help="A folder, a .gguf file, package:NAME/FILE, a hub id[@revision], a named model or a YAML file.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Edit the spec: path=value, e.g. layers.*.mixer.kernel=eager. Repeatable.")
]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's own.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]


@app.command("list")
def list_parts(family: Annotated[str | None, typer.Argument(help="One family; all by default.")] = None) -> None:
    """Show every part: what it is, where it comes from, what it needs."""
    from rich.table import Table

    from zoo.components import registry
    from zoo.declare import names, parts

    chosen = [registry.family_named(family)] if family else None
    found = parts(family)
    for kind in chosen or registry.families():
        table = Table(title=f"{kind.name}: {kind.about}", title_justify="left", show_edge=False, pad_edge=False)
        for heading in ("part", "what it is", "source", "needs"):
            table.add_column(heading, overflow="fold")
        for part in (p for p in found if p.family == kind.name):
            table.add_row(part.name, part.summary, part.source, ", ".join(part.needs))
        console().print(table, "")
    if family is None:
        console().print(f"named models: {', '.join(names())}")


@app.command()
def show(model: ModelArgument, set: SetOption = None, dtype: DtypeOption = "bfloat16",
         full: Annotated[bool, typer.Option(help="Print the whole declaration too.")] = True) -> None:  # fmt: skip
    """Print a model's declaration, its parameters and bytes by component, and its cache size; nothing is built."""
    import torch
    import yaml
    from rich.table import Table

    from zoo.components.spec import dump
    from zoo.declare import spec
    from zoo.describe import summarize
    from zoo.loading import parse_dtype

    wanted = spec(model, *(set or ()))
    total = summarize(wanted, parse_dtype(dtype, torch.bfloat16))
    if full:
        console().print(yaml.safe_dump(dump(wanted), sort_keys=False, default_flow_style=None, width=120), markup=False, highlight=False)
    table = Table("component", "part", "parameters", f"bytes ({dtype})", show_edge=False)
    for row in total.components:
        table.add_row(row.path, row.part, f"{row.parameters:,}", f"{row.bytes:,}")
    table.add_section()
    table.add_row("total", "", f"{total.parameters:,}", f"{total.bytes:,}")
    console().print(table)
    console().print(f"{total.bits_per_weight:.2f} bits per weight; cache {total.cache_bytes_per_token:,} bytes per token, "
                    f"{total.cache_bytes_per_token * total.context:,} for a context of {total.context:,}")  # fmt: skip


@app.command("diff")
def diff_models(a: ModelArgument, b: ModelArgument) -> None:
    """Show where two models' declarations differ."""
    from rich.table import Table

    from zoo.components.spec import compact, diff
    from zoo.declare import spec

    rows = compact(diff(spec(a), spec(b)))
    if not rows:
        console().print("no difference")
        return
    table = Table("path", a, b, show_edge=False)
    for path, left, right in rows:
        table.add_row(path, *("-" if v is None else str(v) for v in (left, right)))
    console().print(table)


def console() -> Any:
    from rich.console import Console

    return Console(soft_wrap=not sys.stdout.isatty())


def main() -> None:
    """Run a command; a mistake of the user's is one message and exit status 2, not a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError, FileExistsError, IsADirectoryError, PermissionError, MemoryError) as e:
        if "--debug" in sys.argv:
            raise
        typer.secho(f"error: {e}", fg="red", err=True)
        sys.exit(2)
