"""``zoo list``, ``zoo show`` and ``zoo diff``: what there is and what it is made of; nothing is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zoo.commands.options import (
    DeviceMapOption,
    DtypeOption,
    MaxMemoryOption,
    ModelArgument,
    SetOption,
    read_device_map,
    read_pairs,
)
from zoo.commands.output import console

if TYPE_CHECKING:
    import torch

    from zoo.describe import Summary
    from zoo.model import ModelSpec


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


def show(model: ModelArgument, set: SetOption = None, dtype: DtypeOption = "bfloat16",
         full: Annotated[bool, typer.Option(help="Print the whole declaration too.")] = True,
         context: Annotated[int | None, typer.Option(help="Tokens that costs are for; the model's context.")] = None,
         device_map: DeviceMapOption = None, max_memory: MaxMemoryOption = None) -> None:  # fmt: skip
    """Print a model's declaration, its parameters and bytes by component, its cache size and what a token costs; nothing is built.

    Fails where it is to be spread over devices and does not fit.
    """
    import torch
    import yaml

    from zoo.components.spec import dump
    from zoo.costs import in_words
    from zoo.declare import spec
    from zoo.describe import summarize
    from zoo.loading import parse_dtype

    wanted, kind = spec(model, *(set or ())), parse_dtype(dtype, torch.bfloat16)
    total = summarize(wanted, kind)
    costs = in_words(wanted, total.context if context is None else context, kind)
    if full:
        console().print(yaml.safe_dump(dump(wanted), sort_keys=False, default_flow_style=None, width=120), markup=False, highlight=False)
    print_sizes(total, dtype)
    console().print(costs)
    if device_map or max_memory:
        limits = read_pairs(max_memory, "max-memory") if max_memory else None
        if not print_plan(wanted, kind, read_device_map(device_map or ["auto"]), limits):
            raise typer.Exit(1)


def print_sizes(total: Summary, dtype: str) -> None:
    """Parameters and bytes by component."""
    from rich.table import Table

    table = Table("component", "part", "parameters", f"bytes ({dtype})", show_edge=False)
    for row in total.components:
        table.add_row(row.path, row.part, f"{row.parameters:,}", f"{row.bytes:,}")
    table.add_section()
    table.add_row("total", "", f"{total.parameters:,}", f"{total.bytes:,}")
    console().print(table)
    console().print(f"{total.bits_per_parameter:.2f} bits per parameter, embeddings included; "
                    f"cache {total.cache_bytes_per_token:,} bytes per token, "
                    f"{total.cache_bytes:,} for a context of {total.context:,}")  # fmt: skip


def print_plan(spec: ModelSpec, dtype: torch.dtype, device_map: Any, max_memory: Mapping[str, str] | None) -> bool:
    """Print where the units of a model go and what does not fit. Returns whether all of it fits."""
    from rich.table import Table

    from zoo.placement import plan, unfit, unit_of, words

    found = plan(spec, dtype, device_map, max_memory)  # type: ignore[arg-type] (plan checks it)
    table = Table("units", "lie on", "run on", "GiB", show_edge=False)
    for units, place, size, streamed in found.rows():
        device = found.device(unit_of(units.partition(" ")[0]))
        table.add_row(units, words(place), f"{device}{', streamed' if streamed else ''}", f"{size / (1 << 30):.3f}")
    console().print(table)
    for place, size in found.held().items():
        most = f" of {found.limits[place] / (1 << 30):.3f}" if place in found.limits else ""
        console().print(f"{words(place)}: {size / (1 << 30):.3f}{most} GiB")
    problems = unfit(found, spec, dtype)
    for problem in problems:
        console().print(f"does not fit: {problem}", markup=False)
    return not problems


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
