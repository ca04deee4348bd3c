"""The command line: the same words as the Python interface."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zoo import hub_cli

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zoo.conversion import Row
    from zoo.eval import Perplexity
    from zoo.saving import Saved

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


app.command("pull")(hub_cli.pull)
app.command("push")(hub_cli.push)


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
         full: Annotated[bool, typer.Option(help="Print the whole declaration too.")] = True,
         context: Annotated[int | None, typer.Option(help="Tokens that costs are for; the model's context.")] = None,
         device_map: Annotated[list[str] | None, typer.Option(help="Plan where its layers go: auto, balanced, or module=place "
                                                                   "(layers.3=1, =cpu for the whole model). Repeatable.")] = None,
         max_memory: Annotated[list[str] | None, typer.Option(help="What may go there: 0=80GiB, cpu=200GiB. Repeatable.")] = None,
         ) -> None:  # fmt: skip
    """Print a model's declaration, its parameters and bytes by component, its cache size and what a token costs; nothing is built.

    Fails where it is to be spread over devices and does not fit.
    """
    import torch
    import yaml
    from rich.table import Table

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
    table = Table("component", "part", "parameters", f"bytes ({dtype})", show_edge=False)
    for row in total.components:
        table.add_row(row.path, row.part, f"{row.parameters:,}", f"{row.bytes:,}")
    table.add_section()
    table.add_row("total", "", f"{total.parameters:,}", f"{total.bytes:,}")
    console().print(table)
    console().print(f"{total.bits_per_parameter:.2f} bits per parameter, embeddings included; "
                    f"cache {total.cache_bytes_per_token:,} bytes per token, "
                    f"{total.cache_bytes:,} for a context of {total.context:,}")  # fmt: skip
    console().print(costs)
    if device_map or max_memory:
        from zoo.placement import print_plan

        if not print_plan(wanted, kind, device_map or ["auto"], max_memory or (), console()):
            raise typer.Exit(1)


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


@app.command("compare")
def compare_models(model: ModelArgument, set: SetOption = None, tokens: Annotated[int, typer.Option(help="Random tokens to run.")] = 64,
                   tolerance: Annotated[float, typer.Option(help="Relative error that counts as equal.")] = 1e-5) -> None:  # fmt: skip
    """Run a checkpoint here and in transformers, and show how far each module's output lies apart; fails at the first that differs."""
    from zoo.compare import against_transformers

    rows = against_transformers(model, tokens, set or ())
    first = next((row for row in rows if not row.error <= tolerance), None)
    for row in rows:
        console().print(f"{row}{'  <- the first that differs' if row is first else ''}", markup=False, highlight=False, soft_wrap=True)
    if first is not None:
        raise typer.Exit(1)


@app.command()
def generate(model: ModelArgument, prompt: str, max_new_tokens: int = 128, temperature: float = 0.0, top_k: int | None = None,
             top_p: float | None = None, min_p: float | None = None, repetition_penalty: float = 1.0, seed: int = 0,
             stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer. Repeatable.")] = None,
             chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template.")] = False,
             set: SetOption = None, dtype: DtypeOption = "auto", device: DeviceOption = "cpu") -> None:  # fmt: skip
    """Continue a prompt, printing the text as it comes."""
    from zoo.generation import stream
    from zoo.loading import load

    loaded = load(model, dtype=dtype, device=device, override=set or ())
    asked = [{"role": "user", "content": prompt}] if chat else prompt
    for piece in stream(loaded, asked, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                        repetition_penalty=repetition_penalty, seed=seed, stop=stop or ()):  # fmt: skip
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@app.command("quantize")
def quantize_model(model: ModelArgument, method: Annotated[str, typer.Argument(help="rtn, gptq, ... (zoo list quantizer)")],
                   out: Annotated[Path, typer.Option(help="Where to write the quantized model.")],
                   bits: Annotated[float | None, typer.Option(help="Bits of a weight, where a method has several; 4. With a fraction, as "
                                                                   "4.25, the mean for which to find each module's.")] = None,
                   choice: Annotated[list[int] | None, typer.Option(help="Bits that a module may have; 2, 3, 4, 8. Repeatable.")] = None,
                   group_size: Annotated[int | None, typer.Option(help="Weights that share a scale; 0 for one scale per channel.")] = None,
                   option: Annotated[list[str] | None, typer.Option(help="A further option of the method: name=value. Repeatable.")] = None,
                   transform: Annotated[list[str] | None, typer.Option(help="smoothquant, awq, rotation, {name: rotation, block: 32}, ... "
                                                                            "before rounding, in this order. Repeatable.")] = None,
                   rule: Annotated[list[str] | None, typer.Option(help="glob=keep or glob={bits: 8}. Repeatable, later ones win.")] = None,
                   text: Annotated[Path | None, typer.Option(help="Calibration text; Python's documentation by default.")] = None,
                   samples: Annotated[int | None, typer.Option(help="Windows of calibration text; 32 for methods that need it.")] = None,
                   length: Annotated[int | None, typer.Option(help="Tokens of a window; 512.")] = None, seed: int = 0,
                   least_tokens: Annotated[int, typer.Option(help="Experts that saw fewer are rounded without data.")] = 1,
                   all_experts: Annotated[bool, typer.Option("--all-experts", help="Show every token to every expert.")] = False,
                   offload: Annotated[Path | None, typer.Option(help="Folder for activations, which else lie in memory.")] = None,
                   format: Annotated[str | None, typer.Option(help="Of the files (zoo list format); the first that fits.")] = None,
                   set: SetOption = None, dtype: DtypeOption = "auto",
                   device: DeviceOption = "cpu", overwrite: bool = False) -> None:  # fmt: skip
    """Quantize a model layer by layer and write it; a killed run continues when started again."""
    from zoo.components.spec import read_value
    from zoo.loading import load
    from zoo.quantize import quantize, verify
    from zoo.quantize.rules import quantizer
    from zoo.saving import check_folder, check_format, format_named, save

    check_folder(out, overwrite)
    work = out.with_name(f"{out.name}.work")
    options = quantizer_options(bits, group_size, option or ())
    if format is not None:
        whole = options | ({"bits": int(bits)} if bits is not None else {})
        check_format(format_named(format), {method: quantizer(method, whole).storage})
    loaded = load(model, dtype=dtype, device=device, override=set or (), lazy=True)
    report = quantize(loaded, method, transforms=[read_value(t) for t in transform or ()], calibration=text, samples=samples, length=length,
                      seed=seed, rules=rule or (), choices=choice, least_tokens=least_tokens, all_experts=all_experts, work_dir=work,
                      offload=offload, **options)  # fmt: skip
    if report.budget:
        console().print(report.budget.table())
    console().print(report.table())
    saved = save(loaded, out, format=format, overwrite=overwrite, check=lambda folder: verify(loaded, folder))
    (out / "quantization_report.json").write_text(report.to_json(), encoding="utf-8")
    shutil.rmtree(work)
    print_saved(saved)


def quantizer_options(bits: float | None, group_size: int | None, further: Sequence[str]) -> dict[str, Any]:
    """A quantizer's fields from the options of the command line; what is not given is the method's own default."""
    from zoo.components.spec import read_value

    options: dict[str, Any] = {} if bits is None else {"bits": int(bits) if bits.is_integer() else bits}
    if group_size is not None:
        options["group_size"] = group_size or None
    for text in further:
        name, equals, value = text.partition("=")
        if not equals or name in {"bits", "group_size", *options}:
            raise ValueError(f"--option {text}: write name=value, each name once; bits and group size have options of their own")
        options[name] = read_value(value)
    return options


@app.command("convert")
def convert_model(model: ModelArgument,
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
                  set: SetOption = None, dtype: DtypeOption = "auto", device: DeviceOption = "cpu",
                  json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None) -> None:  # fmt: skip
    """Turn parts of a trained model into other kinds, weights included, and say what that costs."""
    from zoo import conversion
    from zoo.declare import spec
    from zoo.eval import memory, perplexity, save_results
    from zoo.eval.environment import describe_environment
    from zoo.eval.results import Results, check_target, variant
    from zoo.loading import load
    from zoo.quantize import verify
    from zoo.quantize.calibration import windows
    from zoo.saving import check_folder, save

    planned, calibrated = spec(model, *(set or ())), False
    for word in to:
        step = conversion.plan(planned, word)
        planned, calibrated = step.spec, calibrated or step.calibrated
    if out is not None:
        check_folder(out, overwrite)
    if json_out:
        check_target(json_out)
    loaded = load(model, dtype=dtype, device=device, override=set or ())
    ids = windows(loaded, calibration, samples, length, seed) if samples and calibrated else None
    before = perplexity(loaded, text, context=context or min(512, loaded.spec.context, planned.context), limit=limit)
    new, rows = loaded, []
    for word in to:
        new, report = conversion.convert(new, word, ids=ids)
        rows += report.kinds()
    after = perplexity(new, text, context=before.protocol.context, limit=limit)
    print_conversion(rows, before, after)
    sizes = [memory(m) for m in (loaded, new)]
    console().print("KV cache {:,} -> {:,} bytes per token; weights {:,} -> {:,} bytes".format(
        *(m.cache_bytes_per_token for m in sizes), *(m.bytes for m in sizes)))  # fmt: skip
    if json_out:
        made = variant(" ".join(["converted to", *to]), perplexity=after, memory=sizes[1], spec=new.spec, baseline=loaded.spec,
                       modules=[row._asdict() for row in rows])  # fmt: skip
        original = variant(model, perplexity=before, memory=sizes[0], spec=loaded.spec)
        save_results(Results(environment=describe_environment(), variants=[original, made]), json_out)
    if out is not None:
        print_saved(save(new, out, overwrite=overwrite, check=lambda folder: verify(new, folder)))


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


def print_saved(saved: Saved) -> None:
    console().print(f"wrote {saved.folder}: {saved.bytes:,} bytes; read back before it was put there: tensors and logits are equal")
    if saved.transformers:
        console().print(f"transformers cannot load it: {saved.transformers}")


@app.command("eval")
def evaluate_model(model: ModelArgument, task: Annotated[list[str] | None, typer.Option(help="An lm-eval task. Repeatable.")] = None,
                   limit: Annotated[int | None, typer.Option(help="Documents of each task.")] = None, shots: int | None = None,
                   ppl: Annotated[bool, typer.Option("--perplexity/--no-perplexity")] = True,
                   text: Annotated[Path | None, typer.Option(help="Text for perplexity; Python's documentation by default.")] = None,
                   context: int | None = None, stride: int | None = None, batch_size: int = 8,
                   data: Annotated[Path | None, typer.Option(help="Folder of tasks that read local files.")] = None,
                   chat: bool = False, set: SetOption = None, dtype: DtypeOption = "auto", device: DeviceOption = "cpu",
                   json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None) -> None:  # fmt: skip
    """Measure perplexity and lm-eval tasks."""
    from zoo.eval import evaluate, memory, perplexity, save_results
    from zoo.eval.environment import describe_environment
    from zoo.eval.report import print_table
    from zoo.eval.results import Results, check_target, variant
    from zoo.loading import load

    if json_out:
        check_target(json_out)
    loaded = load(model, dtype=dtype, device=device, override=set or ())
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


@app.command()
def bench(model: Annotated[list[str], typer.Argument(help="One or more models; the first is the baseline of the ratios.")],
          prompt_tokens: int = 512, new_tokens: int = 64, batch_size: Annotated[list[int] | None, typer.Option()] = None, repeats: int = 3,
          set: SetOption = None, dtype: DtypeOption = "auto", device: DeviceOption = "cpu") -> None:  # fmt: skip
    """Measure time to first token, prefill and decode speed; several models in turns in one process."""
    from rich.table import Table

    from zoo.eval import compare_speed
    from zoo.loading import load

    loaded = {m: load(m, dtype=dtype, device=device, override=set or ()) for m in model}
    found = compare_speed(loaded, prompt_tokens=prompt_tokens, new_tokens=new_tokens, batch_sizes=batch_size or [1], repeats=repeats)
    ratio = {(r.name, r.batch_size): r for r in found.ratios}
    table = Table("model", "batch", "first token s", "prefill tok/s", "decode tok/s", "prefill x", "decode x", show_edge=False)
    for name, speeds in found.speeds.items():
        for s in speeds:
            r = ratio.get((name, s.batch_size))
            times = [f"{x.median:.2f}" if x else "-" for x in (r and r.prefill, r and r.decode)]
            table.add_row(name, str(s.batch_size), f"{s.time_to_first_token_s.median:.3f}", f"{s.prefill_tokens_per_s.median:.1f}",
                          f"{s.decode_tokens_per_s.median:.2f}", *times)  # fmt: skip
    console().print(table)


@app.command("classify")
def classify_images(model: ModelArgument, image: Annotated[list[Path], typer.Argument(help="Image files.")],
                    top: Annotated[int, typer.Option(help="Labels to show of each.")] = 5,
                    json_out: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, batch_size: int = 16,
                    set: SetOption = None, dtype: DtypeOption = "auto", device: DeviceOption = "cpu") -> None:  # fmt: skip
    """Say what is on images, most likely label first."""
    import json

    from zoo.classify import as_data, as_table, classify
    from zoo.loading import load

    loaded = load(model, dtype=dtype, device=device, override=set or (), lazy=True)
    scores = classify(loaded, image, top=top, batch_size=batch_size)
    if json_out:
        sys.stdout.write(json.dumps(as_data(image, scores), indent=2) + "\n")
    else:
        console().print(as_table(image, scores))


@app.command("run")
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


def console() -> Any:
    from rich.console import Console

    return Console(soft_wrap=not sys.stdout.isatty())


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
