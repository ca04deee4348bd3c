"""Speed: time to first token, prefill and decode throughput.

Machines drift (clocks, other load), so models are compared in one process, round by round, and the ratio is taken within each round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.model import Model


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Greedy generation of random prompts, all rows of one length.

    time_to_first_token_s: the whole prompt and the choice of the next token. prefill_tokens_per_s: prompt tokens of all rows over
    that time. decode_tokens_per_s: tokens of all rows over the time of the single-token steps after it.
    """

    batch_size: int
    prompt_tokens: int
    new_tokens: int
    repeats: int
    warmup: int
    device: str
    dtype: str
    threads: int
    time_to_first_token_s: Spread
    prefill_tokens_per_s: Spread
    decode_tokens_per_s: Spread


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Throughput over the baseline's, taken within each round; above 1 is faster."""

    name: str
    baseline: str
    batch_size: int
    prefill: Spread
    decode: Spread


@dataclass(frozen=True)
class Comparison:
    """speeds: per model, one for each batch size. ratios: of every model but the first, the baseline."""

    speeds: dict[str, list[Speed]]
    ratios: list[Ratio]


def speed(model: Model, *, prompt_tokens: int = 512, new_tokens: int = 64, batch_sizes: Sequence[int] = (1,), repeats: int = 3,
          warmup: int = 1) -> list[Speed]:  # fmt: skip
    """Measure one model, one result for each batch size. Raises ValueError for sizes that leave nothing to measure."""
    return compare_speed({"model": model}, prompt_tokens=prompt_tokens, new_tokens=new_tokens, batch_sizes=batch_sizes,
                         repeats=repeats, warmup=warmup).speeds["model"]  # fmt: skip


def compare_speed(models: Mapping[str, Model], *, prompt_tokens: int = 512, new_tokens: int = 64, batch_sizes: Sequence[int] = (1,),
                  repeats: int = 3, warmup: int = 1) -> Comparison:  # fmt: skip
    """Measure models in turns: each round runs all of them, in alternating order. The first one is the baseline of the ratios."""
    small = min(prompt_tokens, new_tokens - 1, repeats, *batch_sizes, warmup + 1)
    if not models or small < 1:
        raise ValueError(f"speed needs models, prompt_tokens, batch sizes and repeats of at least 1, new_tokens of at least 2, got "
                         f"{prompt_tokens=}, {new_tokens=}, {batch_sizes=}, {repeats=}, {warmup=}")  # fmt: skip
    speeds: dict[str, list[Speed]] = {name: [] for name in models}
    ratios: list[Ratio] = []
    for rows in batch_sizes:
        rounds = list(_rounds(models, rows, prompt_tokens, new_tokens, warmup + repeats))[warmup:]
        for name, model in models.items():
            runs = [r[name] for r in rounds]
            speeds[name].append(_summary(model, rows, prompt_tokens, new_tokens, warmup, runs))
        ratios += _ratios(rounds, rows)
    return Comparison(speeds, ratios)


@dataclass(frozen=True)
class _Run:
    """Seconds of one measurement."""

    first: float
    rest: float


def _rounds(models: Mapping[str, Model], rows: int, prompt_tokens: int, new_tokens: int, count: int) -> Iterator[dict[str, _Run]]:
    vocab = min(getattr(m.spec.embed, "vocab", None) or 2 for m in models.values())
    prompt = torch.randint(vocab, (rows, prompt_tokens), generator=torch.Generator().manual_seed(0))
    names = list(models)
    for i in range(count):
        order = names if i % 2 == 0 else names[::-1]
        done = {name: _run(models[name], prompt.to(models[name].device), new_tokens) for name in order}
        yield {name: done[name] for name in names}


@torch.inference_mode()
def _run(model: Model, prompt: Tensor, new_tokens: int) -> _Run:
    began = _now(model)
    cache = model.new_cache(prompt.shape[0])
    token = model(prompt, cache=cache, last=True).argmax(-1)
    first = _now(model)
    for _ in range(new_tokens - 1):
        token = model(token, cache=cache, last=True).argmax(-1)
    return _Run(first - began, _now(model) - first)


def _now(model: Model) -> float:
    """Wall-clock seconds, after everything that was queued on an accelerator is done."""
    if model.device.type != "cpu":
        torch.accelerator.synchronize(model.device)
    return time.perf_counter()


def _summary(model: Model, rows: int, prompt_tokens: int, new_tokens: int, warmup: int, runs: Sequence[_Run]) -> Speed:
    return Speed(
        batch_size=rows,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=len(runs),
        warmup=warmup,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        time_to_first_token_s=Spread.of([r.first for r in runs]),
        prefill_tokens_per_s=Spread.of([rows * prompt_tokens / r.first for r in runs]),
        decode_tokens_per_s=Spread.of([rows * (new_tokens - 1) / r.rest for r in runs]),
    )


def _ratios(rounds: Sequence[Mapping[str, _Run]], rows: int) -> list[Ratio]:
    baseline, *others = rounds[0]
    return [
        Ratio(
            name=name,
            baseline=baseline,
            batch_size=rows,
            prefill=Spread.of([r[baseline].first / r[name].first for r in rounds]),
            decode=Spread.of([r[baseline].rest / r[name].rest for r in rounds]),
        )
        for name in others
    ]
