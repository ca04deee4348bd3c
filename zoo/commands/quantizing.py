"""``zoo quantize``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zoo.commands.options import Loading, ModelArgument, with_loading
from zoo.commands.output import console, print_saved

if TYPE_CHECKING:
    from zoo.model import Model
    from zoo.quantize import Report


@with_loading()
def quantize_model(loading: Loading, model: ModelArgument,
                   method: Annotated[str, typer.Argument(help="rtn, gptq, ... (zoo list quantizer)")],
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
                   calibrated_cache: Annotated[str | None, typer.Option(help="fp8 or int8: the cache, with scales "
                                                                             "from the calibration text.")] = None,
                   format: Annotated[str | None, typer.Option(help="Of the files (zoo list format); the first that fits.")] = None,
                   overwrite: bool = False) -> None:  # fmt: skip
    """Quantize a model layer by layer and write it; a killed run continues when started again. Processes of torchrun share the work."""
    from zoo.components.spec import read_value
    from zoo.quantize import calibrate_cache, quantize
    from zoo.quantize.cache_scales import check_calibratable
    from zoo.quantize.distributed import launched
    from zoo.quantize.resume import reserved
    from zoo.replacing import clear
    from zoo.saving import check_folder, check_not_read

    loading.check_whole("quantizing")
    check_folder(out, overwrite)
    work = out.with_name(f"{out.name}.work")
    options = quantizer_options(bits, group_size, option or ())
    if format is not None:
        check_fits(format, method, options | ({"bits": int(bits)} if bits is not None else {}))
    with ExitStack() as stack:
        with launched(loading.device) as process:
            if process.first:
                stack.enter_context(reserved(work))
            loaded = replace(loading, device=process.device).load(model, lazy=True)
            check_not_read(loaded, out)
            if calibrated_cache is not None:
                check_calibratable(loaded.spec, calibrated_cache)
            if format is not None:
                check_together(format, loaded, method, options, rule or ())
            report = quantize(loaded, method, transforms=[read_value(t) for t in transform or ()], calibration=text, samples=samples,
                              length=length, seed=seed, rules=rule or (), choices=choice, least_tokens=least_tokens,
                              all_experts=all_experts, work_dir=work, offload=offload, **options)  # fmt: skip
        if process.first:
            if calibrated_cache is not None:
                calibrate_cache(loaded, calibrated_cache, calibration=text, samples=samples, length=length, seed=seed)
            write(loaded, report, out, format, overwrite)
            clear(work)


def write(loaded: Model, report: Report, out: Path, format: str | None, overwrite: bool) -> None:
    """Print what was done, write the model with its report, and print where. Both come into place together."""
    from zoo.eval.quantization import write_quantization_report
    from zoo.saving import check_saved, save

    if report.budget:
        console().print(report.budget.table())
    console().print(report.table())

    def finish(folder: Path) -> object:
        write_quantization_report(report, folder, out.name)
        return check_saved(loaded, folder)

    print_saved(save(loaded, out, format=format, overwrite=overwrite, check=finish))


def check_fits(format: str, method: str, options: dict[str, Any]) -> None:
    """Raise ValueError, with the reasons, where a format cannot hold what a method makes."""
    from zoo.quantize.rules import quantizer
    from zoo.saving import check_format, format_named

    check_format(format_named(format), {method: quantizer(method, options).storage})


def check_together(format: str, model: Model, method: str, options: dict[str, Any], rules: Sequence[str]) -> None:
    """Raise ValueError where a format holds only weights that files keep in one tensor, and others would be quantized, or some of these."""
    from zoo.quantize.rules import plan, quantizer
    from zoo.saving import disk_storages, family_of, format_named, format_of
    from zoo.storages import set_storage
    from zoo.weights import linear_names

    named, spec = format_named(format), model.spec
    if not named.together:
        return
    names = linear_names(model.source.table) if model.source else {}
    for path, part in plan(spec, quantizer(method, options), rules, names).items():
        spec = set_storage(spec, path, part.storage)
    format_of(spec, format)
    named.config(disk_storages(spec, family_of(spec), named))


def quantizer_options(bits: float | None, group_size: int | None, further: Sequence[str]) -> dict[str, Any]:
    """A quantizer's fields from the options of the command line; what is not given is the method's own default."""
    from zoo.components.spec import read_value
    from zoo.quantize.budget import check_mean

    if bits is not None:
        check_mean(bits)
    options: dict[str, Any] = {} if bits is None else {"bits": int(bits) if bits.is_integer() else bits}
    if group_size is not None:
        options["group_size"] = group_size or None
    for text in further:
        name, equals, value = text.partition("=")
        if not equals or name in {"bits", "group_size", *options}:
            raise ValueError(f"--option {text}: write name=value, each name once; bits and group size have options of their own")
        options[name] = read_value(value)
    return options
