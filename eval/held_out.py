"""Perplexity on held-out text, with everything that two figures must share to be comparable.

Figures of different protocols differ by more than most quantization methods do (Llama-2-7B on WikiText-2: 5.47 with context 2048,
5.12 with 4096, about 8.8 by word), so a figure carries its protocol and comparing across protocols is an error. Published ones:

* ``perplexity(model, pages, context=2048)``: joined by blank lines, windows without overlap (GPTQ, AWQ, OmniQuant, QuIP#);
* ``perplexity(model, pages, joining=None, bos="text", context=n + 1, stride=n, unit="word")``: by word, as lm-eval does with max_length n
  (there the last, shorter window of a page begins earlier and so has a longer context).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from zoo import corpus
from zoo.eval.scoring import run_rows, score
from zoo.model import Model
from zoo.tokenizers import beginning

Unit = Literal["token", "word"]
Bos = Literal["tokenizer", "text", "window", "none"]
Text = str | Path | Sequence[str] | Sequence[int] | Tensor
Window = tuple[list[int], int]  # ids, and the first one that is scored
USUAL_CONTEXT = 2048
CALL = 512  # tokens of a call at most, where a cache that is not exact sets no lower limit


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What two perplexities must share to be comparable; the fields that only describe the text do not count.

    source, sha256: the text. joining: what was put between the given documents; documents: how many texts that left. tokenizer: hash
    of its definition, "" for token ids. bos: where a beginning-of-sequence token was put. context, stride: tokens of a window, and
    from one to the next. tail: what became of the last, shorter window. limit: windows scored at most. prompt: tokens at the
    beginning of each window that were read in one call and not scored. reading: how the cache was filled; where it is exact, that
    changes nothing.
    """

    source: str = field(compare=False)
    sha256: str
    joining: str | None = field(compare=False)
    documents: int
    tokenizer: str
    bos: Bos
    context: int
    stride: int
    tail: Literal["scored", "dropped"]
    unit: Unit
    limit: int | None
    prompt: int = 0
    reading: str = field(default="each window in one call", compare=False)


@dataclass(frozen=True)
class Change:
    """Difference of mean nll per unit in nats, and its standard error with windows as independent samples (None below two)."""

    nll: float
    stderr: float | None

    @property
    def ratio(self) -> float:
        """Perplexity over the baseline's."""
        return _exp(self.nll)


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """value: exp(summed nll / units). nll: mean per scored token, in nats. tokens: how many were scored. words: in the text, None
    where not every token was scored. windows: (summed nll in nats, scored tokens) of each, in the order of the text. cache_bytes:
    what the cache of one row held after the longest window, None in results of earlier versions.
    """

    value: float
    nll: float
    tokens: int
    words: int | None
    seconds: float
    protocol: Protocol
    windows: tuple[tuple[float, int], ...] = field(repr=False)
    cache_bytes: int | None = None

    def versus(self, baseline: Perplexity) -> Change:
        """How much worse than the baseline, paired by window. Raises ValueError, naming the fields, if the protocols differ."""
        here, there = self.protocol, baseline.protocol
        if here != there:
            differ = [f"{f.name} {getattr(there, f.name)!r} against {getattr(here, f.name)!r}"
                      for f in fields(here) if f.compare and getattr(here, f.name) != getattr(there, f.name)]  # fmt: skip
            raise ValueError(f"these perplexities were measured differently and cannot be compared: {', '.join(differ)}")
        per_unit = self.tokens / self.words if here.unit == "word" and self.words else 1.0
        pairs = zip(self.windows, baseline.windows, strict=True)
        nll, stderr = _mean([(x - y, n) for (x, n), (y, _) in pairs])
        return Change(nll * per_unit, None if stderr is None else stderr * per_unit)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Perplexity:
        """The inverse of dataclasses.asdict."""
        windows = tuple((float(x), int(n)) for x, n in data["windows"])
        return cls(**(data | {"windows": windows, "protocol": Protocol(**data["protocol"])}))


def perplexity(model: Model, text: Text | None = None, *, context: int | None = None, stride: int | None = None,
               joining: str | None = "\n\n", bos: Bos = "tokenizer", unit: Unit = "token", batch_size: int = 1,
               limit: int | None = None, prompt: int | None = None) -> Perplexity:  # fmt: skip
    """How well a model predicts a text.

    text: a text, a file of it, documents, token ids, or None for the test text of zoo.corpus. context: tokens of a window; None is
    2048, or what the model was trained for where that is less. stride: tokens from one window to the next, of which only the new ones
    are scored; None scores windows without overlap: the first token of each is context only, and a shorter last window is dropped
    unless it is the only one. joining: put between documents; None scores each on its own, to its end. bos: ``tokenizer`` puts before
    each text what the tokenizer puts there by default (what it puts after a text is left out), ``text`` puts one token before each
    text, ``window`` before each window, ``none`` none. unit: per token or per word (between whitespace). limit: windows scored at most.
    prompt: tokens at the beginning of each window that are read in one call and not scored.

    A model whose cache is not exact (``spec.cache.exact``) reads a window as generation would: the prompt in one call, the rest in
    calls of no more tokens than ``cache.budget()`` allows, which give what single tokens give. What caches do to a prompt of one call
    (SnapKV thins it out, KIVI shows it to itself exactly) is in the figure only with ``prompt``.

    Raises ValueError, before the model runs, for settings that contradict each other and for texts too short to score.
    """
    began = time.perf_counter()
    material = _read(model, text, joining, bos)
    context = min(USUAL_CONTEXT, model.spec.context) if context is None else context
    if min(1 if x is None else x for x in (stride, limit)) < 1:
        raise ValueError(f"stride and limit must be at least 1, got stride {stride} and limit {limit}")
    windows, protocol = _plan(material, context, stride, unit, limit, prompt or 0)
    protocol = replace(protocol, reading=_reading(model, prompt or 0))
    words = material.words if sum(len(ids) - first for ids, first in windows) >= material.tokens else None
    if unit == "word" and words is None:
        raise ValueError("a figure per word needs a text of which every token is scored: "
                         "pass bos='window', or bos='text' with a stride below the context, and no limit")  # fmt: skip
    scored, cache_bytes = _run(model, windows, batch_size, prompt or 0)
    total, tokens = sum(x for x, _ in scored), sum(n for _, n in scored)
    return Perplexity(value=_exp(total / (words if unit == "word" and words else tokens)), nll=total / tokens, tokens=tokens,
                      words=words, seconds=time.perf_counter() - began, protocol=protocol, windows=tuple(scored),
                      cache_bytes=cache_bytes)  # fmt: skip


# ---- the text ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Material:
    """A text as token ids without special tokens, one list a document, and the tokens that go before it."""

    documents: list[list[int]]
    prefix: list[int]
    bos: Bos
    joined: bool
    words: int | None
    about: dict[str, Any]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))


def _read(model: Model, text: Text | None, joining: str | None, bos: Bos) -> _Material:
    if isinstance(text, Tensor) or (text and not isinstance(text, (str, Path)) and isinstance(text[0], int)):
        ids = [int(i) for i in text]
        prefix = [] if bos in ("tokenizer", "none") else _bos(model.tokenizer, bos)
        about = {"source": "token ids", "sha256": _sha256(" ".join(map(str, ids))), "joining": None, "tokenizer": ""}
        return _Material([ids], prefix, bos, True, None, about)
    source, given = _texts(text)
    joined = joining is not None
    texts = [joining.join(given)] if joined else given
    tokenizer = model.tokenizer
    prefix = {"tokenizer": lambda: beginning(tokenizer), "none": list}.get(bos, lambda: _bos(tokenizer, bos))()
    about = {"source": source, "sha256": _sha256("\0".join(texts)), "joining": joining if len(given) > 1 else None,
             "tokenizer": _sha256(tokenizer.backend_tokenizer.to_str())}  # fmt: skip
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return _Material(encoded, prefix, bos, joined, sum(len(t.split()) for t in texts), about)


def _texts(text: Any) -> tuple[str, list[str]]:
    """Where a text comes from, and its documents."""
    if text is None:
        return f"{corpus.SOURCE}, test", [corpus.text("test")]
    if isinstance(text, Path):
        return text.name, [text.read_text(encoding="utf-8")]
    return ("a text", [text]) if isinstance(text, str) else (f"{len(text)} documents", list(text))


def _bos(tokenizer: Any, bos: Bos) -> list[int]:
    if tokenizer.bos_token_id is None:
        raise ValueError(f"bos={bos!r}: the tokenizer has no beginning-of-sequence token; pass bos='none'")
    return [tokenizer.bos_token_id]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ---- windows -----------------------------------------------------------------------------------------------------------------


def _plan(material: _Material, context: int, stride: int | None, unit: Unit, limit: int | None,
          prompt: int) -> tuple[list[Window], Protocol]:  # fmt: skip
    start = material.prefix if material.bos == "window" else []
    room = context - len(start)
    if context < 2 or not 1 <= (stride or room) <= room:
        raise ValueError(f"context must be at least 2 and stride lie in 1..{room}, got context {context} and stride {stride}")
    if not 0 <= prompt < context:
        raise ValueError(f"prompt must leave tokens of the {context} of a window to score, got {prompt}")
    rows = [ids if start else material.prefix + ids for ids in material.documents]
    tail = bool(start) or (stride or room) < room or not material.joined or max(map(len, rows)) <= room
    every = (w for ids in rows for w in _windows(ids, start, room, stride or room, tail))
    windows = [(ids, max(first, prompt)) for ids, first in every if len(ids) > prompt][:limit]
    if not windows:
        raise ValueError(f"the text has {material.tokens} tokens; at least {prompt + 1 if prompt > 1 else 'two'} are needed to score one")
    return windows, Protocol(**material.about, documents=len(rows), bos=material.bos if material.prefix else "none", context=context,
                             stride=stride or room, tail="scored" if tail else "dropped", unit=unit, limit=limit,
                             prompt=prompt)  # fmt: skip


def _windows(ids: list[int], start: list[int], room: int, stride: int, tail: bool) -> list[Window]:
    """Cut ids into windows of ``start`` and ``room`` ids, each token scored once at most."""
    windows: list[Window] = []
    done = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + room, len(ids))
        first = max(done, begin if start else begin + 1)
        if first >= end or (end - begin < room and not tail):
            break
        windows.append((start + ids[begin:end], first - begin + len(start)))
        done = end
    return windows


@torch.inference_mode()
def _run(model: Model, windows: Sequence[Window], batch_size: int, prompt: int) -> tuple[list[tuple[float, int]], int]:
    """(summed nll in nats, scored tokens) of each window, those of like length together; bytes of a row's cache after the longest."""
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i][0]))
    result, held = [(0.0, 0)] * len(windows), 0
    for begin in range(0, len(order), batch_size):
        part = order[begin : begin + batch_size]
        cache = model.new_cache(len(part))
        ids, hidden = _read_rows(model, [windows[i][0] for i in part], cache, prompt)
        held = held or cache.bytes() // len(part)
        spans = [(windows[i][1], len(windows[i][0])) for i in part]
        predictors = torch.cat([hidden[row, first - 1 : end - 1] for row, (first, end) in enumerate(spans)])
        targets = torch.cat([ids[row, first:end] for row, (first, end) in enumerate(spans)])
        scored, _ = score(model, predictors, targets)
        sizes = [end - first for first, end in spans]
        for i, x, n in zip(part, scored.double().cpu().split(sizes), sizes, strict=True):
            result[i] = (-float(x.sum()), n)
    return result, held


def _read_rows(model: Model, rows: Sequence[list[int]], cache: Any, prompt: int) -> tuple[Tensor, Tensor]:
    """ids [B, T] and hidden states [B, T, M] of rows through a new cache, in one call where it is exact."""
    longest = max(map(len, rows))
    cache.reserve(longest)  # so that its bytes are what the tokens need, not how far buffers grew ahead of them
    if model.spec.cache.exact:
        return run_rows(model, rows, cache)
    parts: list[tuple[Tensor, Tensor]] = []
    at = 0
    while at < longest:
        room = min(n for n, row in zip(cache.budget(), rows, strict=True) if len(row) > at)
        size = prompt if prompt and not parts else min(room, CALL)
        parts.append(run_rows(model, [row[at : at + size] for row in rows], cache))
        at += size
        if len(parts) == 1:  # a prompt that was thinned out gave its room back
            cache.reserve(max((n for store in cache.stores for n in store.count), default=0) + longest - at)
    ids, hidden = zip(*parts, strict=True)
    return torch.cat(ids, 1), torch.cat(hidden, 1)


def _reading(model: Model, prompt: int) -> str:
    """How ``_read_rows`` reads, in words."""
    if model.spec.cache.exact:
        return Protocol.reading
    rest = f"calls of at most {min(CALL, model.new_cache(1).budget()[0])} tokens"
    return f"through the {model.spec.cache.name} cache: {f'a prompt of {prompt} tokens, then ' if prompt else ''}{rest}"


# ---- statistics --------------------------------------------------------------------------------------------------------------


def _mean(windows: Sequence[tuple[float, int]]) -> tuple[float, float | None]:
    """(sum, tokens) of each window -> the mean per token and its standard error (ratio estimator), None below two windows."""
    tokens = sum(n for _, n in windows)
    mean = sum(x for x, _ in windows) / tokens
    count = len(windows)
    if count < 2:
        return mean, None
    spread = sum((x - n * mean) ** 2 for x, n in windows)
    return mean, math.sqrt(spread * count / (count - 1)) / tokens


def _exp(x: float) -> float:
    return math.exp(x) if not x > 709 else math.inf
