"""The model card of a published checkpoint, written from what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.checkpoint import is_hub_id
from zoo.eval.quantization import WRITTEN, picture_name, section
from zoo.eval.results import Results, Variant, load_results
from zoo.eval.summary import NOT_MEASURED, summarize
from zoo.quantize.report import Row, rows_of

TEMPLATES = Path(__file__).parent / "templates"
AUTO = {  # transformers' class that loads an architecture, by how its name ends
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForImageClassification": "AutoModelForImageClassification",
}
VLLM_BITS = {4, 8}  # of pack-quantized weights that vLLM has kernels for
HEAT_MAP = WRITTEN[2]
SHOWN = ("results.json", "report.html", "pareto.png")  # what a run of a recipe leaves beside the models


@dataclass(frozen=True)
class Run:
    """A recipe's run that made a checkpoint. folder: of the run. results: what it measured. label: of the variant published."""

    folder: Path
    results: Results
    label: str

    @property
    def variant(self) -> Variant:
        return next(v for v in self.results.variants if v.name == self.label)

    def files(self) -> dict[str, Path]:
        """What goes beside the checkpoint: results, report and pictures, those that there are."""
        places = {name: self.folder / name for name in SHOWN} | {HEAT_MAP: self.folder / picture_name(self.label)}
        return {name: path for name, path in places.items() if path.is_file()}


def run_of(folder: Path, results: Path | None = None) -> Run | None:
    """The run that wrote a checkpoint folder: ``results`` (its folder or file), or where RUN/models/LABEL lies; None where there is none.

    Raises ValueError where the results name no variant of the folder's name.
    """
    if results is None:
        beside = folder.resolve().parent.parent / "results.json"
        if folder.resolve().parent.name != "models" or not beside.is_file():
            return None
        results = beside
    path = results / "results.json" if results.is_dir() else results
    found, label = load_results(path), folder.resolve().name
    names = [v.name for v in found.variants]
    if label not in names:
        raise ValueError(f"{path} has no variant {label!r} (it has {', '.join(names)}); the folder's name must be the variant's label")
    return Run(path.parent, found, label)


def write_card(folder: Path, name: str, run: Run | None = None, base: str | None = None) -> str:
    """The card (Markdown with the hub's header) of the checkpoint in ``folder`` as it will be ``name`` on the hub.

    run: what was measured, for table, pictures and recipe; without one, the report of the quantization in the folder tells of the
    modules. base: the model that it was made of, by default the recipe's.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    config, rows = json.loads((folder / "config.json").read_text(encoding="utf-8")), rows_in(folder, run)
    picture = HEAT_MAP if (folder / HEAT_MAP).is_file() or (run and HEAT_MAP in run.files()) else None
    model = base or (source_of(run) if run else None)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    return environment.get_template("card.md.jinja").render(
        name=name,
        header=header(config, model),
        base=model,
        auto=auto_class(config),
        vllm=vllm_loads(config),
        quantization=config.get("quantization_config"),
        run=run,
        recipe=json.dumps(without_paths(run.results.recipe), indent=2) if run else None,
        table=table(run.results, run.label) if run else None,
        modules=section(rows, WRITTEN[0] if run is None else SHOWN[0], picture) if rows else "",
    )


def rows_in(folder: Path, run: Run | None) -> list[Row]:
    """What was done to each quantized module, as the run's results or the report in the folder say."""
    if run is not None:
        return rows_of(run.variant.modules)
    report = folder / WRITTEN[0]
    return rows_of(json.loads(report.read_text(encoding="utf-8"))["rows"]) if report.is_file() else []


def header(config: Mapping[str, Any], base: str | None) -> dict[str, Any]:
    """What the hub reads: only what is known."""
    tags = ["modular-zoo", *([str(config["quantization_config"].get("quant_method"))] if config.get("quantization_config") else [])]
    found: dict[str, Any] = {"tags": tags}
    if base and is_hub_id(base):
        found["base_model"] = base.partition("@")[0]
    if auto_class(config):
        found["library_name"] = "transformers"
    return found


def without_paths(data: Any) -> Any:
    """The same data with the last part of each absolute path in its place: a card is for other machines."""
    if isinstance(data, Mapping):
        return {k: without_paths(v) for k, v in data.items()}
    if isinstance(data, list):
        return [without_paths(v) for v in data]
    return Path(data).name if isinstance(data, str) and Path(data).is_absolute() else data


def source_of(run: Run) -> str | None:
    """The hub's name of the model that the published variant was made of; None where that was no model of the hub."""
    index = [v.name for v in run.results.variants].index(run.label)
    variants = run.results.recipe.get("variants") or []
    own = variants[index].get("model") if index < len(variants) else None
    model = own or run.results.recipe.get("model")
    return model if isinstance(model, str) and is_hub_id(model) else None


def auto_class(config: Mapping[str, Any]) -> str | None:
    """transformers' class for a checkpoint; None where its spec is in config.json, which zoo alone reads."""
    if "zoo_spec" in config:
        return None
    named = str((config.get("architectures") or [""])[0])
    return next((auto for end, auto in AUTO.items() if named.endswith(end)), "AutoModel")


def vllm_loads(config: Mapping[str, Any]) -> bool:
    """Whether vLLM serves a checkpoint: a causal language model, unquantized or with packed integers of a width that it has kernels for."""
    if auto_class(config) != "AutoModelForCausalLM":
        return False
    quantization = config.get("quantization_config")
    groups = (quantization or {}).get("config_groups", {}).values()
    return quantization is None or (bool(groups) and {g["weights"]["num_bits"] for g in groups} <= VLLM_BITS)


def table(results: Results, label: str) -> str:
    """The comparison as a Markdown table, the published variant in bold."""
    summary = summarize(results)
    rows = [["", *(c.title for c in summary.columns)], ["---"] * (1 + len(summary.columns))]
    for i, name in enumerate(summary.names):
        cells = [column.cells[i].text or NOT_MEASURED for column in summary.columns]
        rows.append([f"**{name}**" if name == label else name, *cells])
    return "\n".join(f"| {' | '.join(_cell(c) for c in row)} |" for row in rows)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
