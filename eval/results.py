"""The results file: what was measured of each variant, how, and where. One JSON document, checked when it is written and read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from zoo.components.spec import Spec, compact, diff, dump
from zoo.quantize.error_map import error_map
from zoo.quantize.report import rows_of

if TYPE_CHECKING:
    from zoo.eval.footprint import Memory, PeakMemory
    from zoo.eval.harness import Evaluation, TaskResult
    from zoo.eval.held_out import Perplexity
    from zoo.eval.timing import Ratio, Speed

SCHEMA = 1
STRICT = ConfigDict(extra="forbid")
ABOUT_A_TASK = ("stderr", "n", "version", "shots", "higher_is_better")  # the keys beside the metrics


class ResultsError(ValueError):
    """A results file that is not one; the message lists every mistake with its place."""


@dataclass(kw_only=True)
class Variant:
    """One model of a comparison. None is "not measured" everywhere.

    perplexity: at the first context that was measured; perplexities: at the further ones, by tokens of a window. tasks: by name, each
    metric by name and the keys of ABOUT_A_TASK; stderr and higher_is_better are by metric. bytes: weights in memory.
    bits_per_weight: of the linear modules in the layers. cache_bytes_per_token: what one more token takes in all layers, as long as
    it is kept; cache_bytes: what the cache of one row held after a window, by tokens of the window. spec_diff: (path, baseline,
    here). modules: rows of the conversion or the quantizer. error_map: the quantized modules' errors by kind and layer, see
    ``zoo.quantize.error_map``. measured: the protocol of each figure: ``perplexity`` and ``perplexity
    at N`` (a Perplexity each), ``tasks`` (settings, items by task and metric), ``speed`` (a Speed, with its ``ratio`` where it ran
    beside the baseline), ``memory``, ``peak``. error: why it failed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    perplexity: float | None = None
    perplexities: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    bytes: int | None = None
    disk_bytes: int | None = None
    bits_per_weight: float | None = None
    cache_bytes_per_token: int | None = None
    cache_bytes: dict[str, int] = field(default_factory=dict)
    decode_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    time_to_first_token_s: float | None = None
    peak_bytes: int | None = None
    spec: Any = None
    spec_diff: list[tuple[str, Any, Any]] = field(default_factory=list)
    modules: list[dict[str, Any]] = field(default_factory=list)
    error_map: dict[str, Any] | None = None
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def metrics(self, task: str) -> dict[str, float]:
        """The metrics of a task by name, none where it was not run."""
        return {k: float(v) for k, v in self.tasks.get(task, {}).items() if k not in ABOUT_A_TASK}


@dataclass(kw_only=True)
class Results:
    """variants: the first is the baseline. environment: see describe_environment. protocol, recipe: as the recipe gave them."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    environment: dict[str, Any]
    variants: list[Variant]
    protocol: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def baseline(self) -> Variant:
        return self.variants[0]


def variant(name: str, *, perplexity: Perplexity | None = None, further: Sequence[Perplexity] = (), evaluation: Evaluation | None = None,
            speed: Speed | None = None, ratio: Ratio | None = None, memory: Memory | None = None, peak: PeakMemory | None = None,
            disk_bytes: int | None = None, spec: Spec | None = None, baseline: Spec | None = None,
            modules: Sequence[Mapping[str, Any]] = (), seconds: Mapping[str, float] | None = None,
            error: str | None = None) -> Variant:  # fmt: skip
    """Gather the measurements of one model. further: perplexities at other contexts. ratio: its speed against the baseline's; spec,
    baseline: what it and the baseline are.
    """
    errors = error_map(rows_of(modules))
    at = {f"perplexity at {p.protocol.context}": p for p in further}
    parts = {"perplexity": perplexity, **at, "speed": speed, "memory": memory, "peak": peak}
    windows = [p for p in (perplexity, *further) if p is not None]
    measured = {key: asdict(part) for key, part in parts.items() if part is not None}
    if speed and ratio:
        measured["speed"]["ratio"] = asdict(ratio)
    if evaluation:
        items = {task: dict(result.items) for task, result in evaluation.tasks.items()}
        measured["tasks"] = {"settings": evaluation.settings, "items": items}
    return Variant(
        name=name,
        perplexity=perplexity and perplexity.value,
        perplexities={str(p.protocol.context): p.value for p in further},
        tasks={task: _task(result) for task, result in evaluation.tasks.items()} if evaluation else {},
        bytes=memory and memory.bytes,
        disk_bytes=disk_bytes,
        bits_per_weight=memory and memory.linear_bits,
        cache_bytes_per_token=memory and memory.cache_bytes_per_token,
        cache_bytes={str(p.protocol.context): p.cache_bytes for p in windows if p.cache_bytes is not None},
        decode_tokens_per_s=speed and speed.decode_tokens_per_s.median,
        prefill_tokens_per_s=speed and speed.prefill_tokens_per_s.median,
        time_to_first_token_s=speed and speed.time_to_first_token_s.median,
        peak_bytes=peak and peak.peak,
        spec=dump(spec),
        spec_diff=compact(diff(baseline, spec)) if spec and baseline else [],
        modules=[dict(row) for row in modules],
        error_map=errors and errors.to_dict(),
        measured=measured,
        seconds=dict(seconds or {}),
        error=error,
    )


def _task(result: TaskResult) -> dict[str, Any]:
    about = {key: getattr(result, key) for key in ABOUT_A_TASK}
    return {**result.metrics, **about}


def check_results(data: Mapping[str, Any]) -> Results:
    """Plain data -> results. Raises ResultsError."""
    if data.get("schema") != SCHEMA:
        raise ResultsError(f"schema: this version reads schema {SCHEMA}, the results have {data.get('schema')!r}")
    try:
        results = TypeAdapter(Results).validate_python(data)
    except ValidationError as e:
        mistakes = [f"{'.'.join(map(str, x['loc']))}: {x['msg'].lower()}, got {x['input']!r}" for x in e.errors()]
        raise ResultsError("\n".join(mistakes)) from None
    names = [v.name for v in results.variants]
    twice = sorted({n for n in names if names.count(n) > 1})
    if not names or twice:
        raise ResultsError(f"variants: names must differ, {', '.join(twice)} do not" if twice else "variants: there are none")
    return results


def load_results(path: str | Path) -> Results:
    """Raises ResultsError for a file that holds no results, OSError for one that cannot be read."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as e:
        raise ResultsError(f"{path} is not JSON: {e}") from None
    if not isinstance(data, dict):
        raise ResultsError(f"{path} holds a {type(data).__name__}, not results")
    return check_results(data)


def save_results(results: Results | Mapping[str, Any], path: str | Path) -> None:
    """Check and write, all or nothing. Infinite and undefined numbers, which JSON lacks, become the strings inf, -inf and nan."""
    checked = results if isinstance(results, Results) else check_results(results)
    write_atomic(path, json.dumps(_finite(asdict(checked)), indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def check_target(path: str | Path) -> None:
    """Raise FileExistsError if writing results to ``path`` would replace anything but earlier results."""
    path = Path(path)
    if path.is_dir():
        raise FileExistsError(f"{path} is a folder; give the name of a file in it")
    if not path.exists():
        return
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        data = None
    if not (isinstance(data, dict) and {"schema", "variants"} <= data.keys()):
        raise FileExistsError(f"{path} is there and holds no results, so it is not replaced; give another name")


def write_atomic(path: str | Path, content: bytes) -> None:
    """Write a file under a temporary name beside it and rename it, so that nobody ever sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(v) for v in value]
    return value
