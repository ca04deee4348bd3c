"""``zoo convert``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zoo.commands.options import Loading, ModelArgument, with_loading
from zoo.commands.output import console, print_saved

if TYPE_CHECKING:
    from zoo.conversion import Row
    from zoo.eval import Perplexity
    from zoo.model import Model, ModelSpec


@with_loading()
def convert_model(loading: Loading, model: ModelArgument,
                  to: Annotated[list[str], typer.Option(help="mha, mqa, mla, moe, {name: mla, rank: 64}, or an edit that says where: "
                                                             "layers.0:8.mixer.projection={name: gqa, kv_heads: 1}. Repeatable.")],
                  out: Annotated[Path | None, typer.Option(help="Where to write the converted model.")] = None, overwrite: bool = False,
                  calibration: Annotated[Path | None, typer.Option(help="Text that conversions which lose something are to lose least "
                                                                        "on; Python's documentation by default.")] = None,
                  samples: Annotated[int, typer.Option(help="Windows of calibration text; 0 for none.")] = 16,
                  length: Annotated[int | None, typer.Option(help="Tokens of a window of calibration text; 512.")] = None, seed: int = 0,
                  text: Annotated[Path | None, typer.Option(help="Text for perplexity; Python's documentation by default.")] = None,
                  context: Annotated[int | None, typer.Option(help="Tokens of a window of perplexity; at most 512.")] = None,
                  limit: Annotated[int, typer.Option(help="Windows of perplexity at most.")] = 4,
                  json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None) -> None:  # fmt: skip
    """Turn parts of a trained model into other kinds, weights included, and say what that costs."""
    from zoo.conversion import convert
    from zoo.eval import memory, perplexity
    from zoo.eval.results import check_target
    from zoo.quantize.calibration import windows
    from zoo.saving import check_folder, check_not_read, check_saved, save

    loading.check_whole("converting")
    planned, calibrated = planned_steps(loading.spec(model), to)
    if out is not None:
        check_folder(out, overwrite)
    if json_out:
        check_target(json_out)
    loaded = loading.load(model)
    if out is not None:
        check_not_read(loaded, out)
    ids = windows(loaded, calibration, samples, length, seed) if samples and calibrated else None
    before = perplexity(loaded, text, context=context or min(512, loaded.spec.context, planned.context), limit=limit)
    new, rows = loaded, []
    for word in to:
        new, report = convert(new, word, ids=ids)
        rows += report.kinds()
    after = perplexity(new, text, context=before.protocol.context, limit=limit)
    print_conversion(rows, before, after)
    console().print("KV cache {:,} -> {:,} bytes per token; weights {:,} -> {:,} bytes".format(
        *(memory(m).cache_bytes_per_token for m in (loaded, new)), *(memory(m).bytes for m in (loaded, new))))  # fmt: skip
    if json_out:
        write_figures(json_out, (model, loaded, before), (" ".join(["converted to", *to]), new, after), rows)
    if out is not None:
        print_saved(save(new, out, overwrite=overwrite, check=partial(check_saved, new)))


def planned_steps(spec: ModelSpec, to: Sequence[str]) -> tuple[ModelSpec, bool]:
    """What the conversions make of a declaration one after the other, and whether any of them looks at text."""
    from zoo.conversion import plan

    calibrated = False
    for word in to:
        step = plan(spec, word)
        spec, calibrated = step.spec, calibrated or step.calibrated
    return spec, calibrated


def print_conversion(rows: Sequence[Row], before: Perplexity, after: Perplexity) -> None:
    """A row for each kind of converted part, and the perplexities."""
    from rich.table import Table

    from zoo.conversion import said

    table = Table("conversion", "where", "weights", "lost", show_edge=False)
    for row in rows:
        table.add_row(row.conversion.replace("_to_", " to "), row.where, said(row), row.lost or ("nothing" if row.exact else "see weights"))
    console().print(table)
    change = after.versus(before)
    noise = "" if change.stderr is None else f" ± {100 * change.ratio * change.stderr:.2f}"
    percent = round(100 * (change.ratio - 1), 2) + 0.0  # no negative zero
    console().print(f"perplexity {before.value:.4g} -> {after.value:.4g} ({percent:+.2f}{noise} %), {len(after.windows)} windows of "
                    f"{after.protocol.context} tokens of {after.protocol.source}")  # fmt: skip


Measured = tuple[str, "Model", "Perplexity"]


def write_figures(path: Path, old: Measured, new: Measured, rows: Sequence[Row]) -> None:
    """The figures of both models, each under its name, as a results file."""
    from zoo.eval import memory, save_results
    from zoo.eval.environment import describe_environment
    from zoo.eval.results import Results, variant

    (name, loaded, before), (label, converted, after) = old, new
    original = variant(name, perplexity=before, memory=memory(loaded), spec=loaded.spec)
    made = variant(label, perplexity=after, memory=memory(converted), spec=converted.spec, baseline=loaded.spec,
                   modules=[row._asdict() for row in rows])  # fmt: skip
    save_results(Results(environment=describe_environment(), variants=[original, made]), path)
