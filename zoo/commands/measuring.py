"""``zoo eval`` and ``zoo bench``: how good and how fast a model is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zoo.commands.options import Loading, ModelArgument, with_loading
from zoo.commands.output import console

if TYPE_CHECKING:
    from zoo.eval.timing import Comparison


@with_loading()
def evaluate_model(loading: Loading, model: ModelArgument,
                   task: Annotated[list[str] | None, typer.Option(help="An lm-eval task. Repeatable.")] = None,
                   limit: Annotated[int | None, typer.Option(help="Documents of each task.")] = None, shots: int | None = None,
                   ppl: Annotated[bool, typer.Option("--perplexity/--no-perplexity")] = True,
                   text: Annotated[Path | None, typer.Option(help="Text for perplexity; Python's documentation by default.")] = None,
                   context: int | None = None, stride: int | None = None, batch_size: int = 8,
                   data: Annotated[Path | None, typer.Option(help="Folder of tasks that read local files.")] = None, chat: bool = False,
                   json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None) -> None:  # fmt: skip
    """Measure perplexity and lm-eval tasks."""
    from zoo.eval import evaluate, memory, perplexity, save_results
    from zoo.eval.environment import describe_environment
    from zoo.eval.report import print_table
    from zoo.eval.results import Results, check_target, variant

    if json_out:
        check_target(json_out)
    loaded = loading.load(model)
    scored = perplexity(loaded, text, context=context, stride=stride) if ppl else None
    tasks = (
        evaluate(loaded, task, limit=limit, num_fewshot=shots, batch_size=batch_size, data_folder=data, chat_template=chat)
        if task
        else None
    )
    row = variant(model, perplexity=scored, evaluation=tasks, memory=memory(loaded), spec=loaded.spec)
    results = Results(environment=describe_environment(), variants=[row])
    print_table(results, console())
    if json_out:
        save_results(results, json_out)


@with_loading()
def bench(loading: Loading,
          model: Annotated[list[str], typer.Argument(help="One or more models; the first is the baseline of the ratios.")],
          prompt_tokens: int = 512, new_tokens: int = 64, batch_size: Annotated[list[int] | None, typer.Option()] = None,
          repeats: int = 3) -> None:  # fmt: skip
    """Measure time to first token, prefill and decode speed; several models in turns in one process."""
    from zoo.eval import compare_speed

    loaded = {m: loading.load(m) for m in model}
    print_speeds(compare_speed(loaded, prompt_tokens=prompt_tokens, new_tokens=new_tokens, batch_sizes=batch_size or [1], repeats=repeats))


def print_speeds(found: Comparison) -> None:
    """A row for each model and batch size, with the ratios to the first model."""
    from rich.table import Table

    ratio = {(r.name, r.batch_size): r for r in found.ratios}
    table = Table("model", "batch", "first token s", "prefill tok/s", "decode tok/s", "prefill x", "decode x", show_edge=False)
    for name, speeds in found.speeds.items():
        for s in speeds:
            r = ratio.get((name, s.batch_size))
            times = [f"{x.median:.2f}" if x else "-" for x in (r and r.prefill, r and r.decode)]
            table.add_row(name, str(s.batch_size), f"{s.time_to_first_token_s.median:.3f}", f"{s.prefill_tokens_per_s.median:.1f}",
                          f"{s.decode_tokens_per_s.median:.2f}", *times)  # fmt: skip
    console().print(table)
