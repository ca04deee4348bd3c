"""Perplexity on held-out text, with everything that two figures must share to be comparable.

Figures of different protocols differ by more than most quantization methods do (Llama-2-7B on WikiText-2: 5.47 with context 2048,
5.12 with 4096, about 8.8 by word), so a figure carries its protocol and comparing across protocols is an error. Published ones:

* ``perplexity(model, pages, context=2048)``: joined by blank lines, windows without overlap (GPTQ, AWQ, OmniQuant, QuIP#);
* ``perplexity(model, pages, joining=None, bos="text", context=n + 1, stride=n, unit="word")``: lm-eval's word perplexity, max_length n.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from zoo import corpus
from zoo.eval.scoring import run_rows, score
from zoo.model import Model

Unit = Literal["token", "word"]
Bos = Literal["tokenizer", "text", "window", "none"]
Text = str | Path | Sequence[str] | Sequence[int] | Tensor
Window = tuple[list[int], int]  # ids, and the first one that is scored
USUAL_CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What two perplexities must share to be comparable; the fields that only describe the text do not count.

    source, sha256: the text. joining: what was put between the given documents; documents: how many texts that left. tokenizer: hash
    of its definition, "" for token ids. bos: where a beginning-of-sequence token was put. context, stride: tokens of a window, and
    from one to the next. tail: what became of the last, shorter window. limit: windows scored at most.
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
    where not every token was scored. windows: (summed nll in nats, scored tokens) of each, in the order of the text.
    """

    value: float
    nll: float
    tokens: int
    words: int | None
    seconds: float
    protocol: Protocol
    windows: tuple[tuple[float, int], ...]

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
               limit: int | None = None) -> Perplexity:  # fmt: skip
    """How well a model predicts a text.

    text: a text, a file of it, documents, token ids, or None for the test text of zoo.corpus. context: tokens of a window; None is
    2048, or what the model was trained for where that is less. stride: tokens from one window to the next, of which only the new
    ones are scored; None scores windows without overlap: the first token of each is context only, and a shorter last window is
    dropped unless it is the only one. joining: put between documents; None scores each on its own, to its end. bos: ``tokenizer``
    does what the tokenizer does by default, ``text`` puts one token before each text, ``window`` before each window, ``none`` none.
    unit: per token or per word (between whitespace). limit: windows scored at most.

    Raises ValueError, before the model runs, for settings that contradict each other and for texts too short to score.
    """
    source, documents = _read(text, joining)
    context = context or min(USUAL_CONTEXT, model.spec.context)
    prefix = _prefix(model, bos, documents)
    encoded = [_encode(model, d) for d in documents]
    room = context - len(prefix) if bos == "window" else context
    if context < 2 or not 1 <= (stride or room) <= room:
        raise ValueError(f"context must be at least 2 and stride lie in 1..{room}, got context {context} and stride {stride}")
    start = prefix if bos == "window" else []
    rows = encoded if bos == "window" else [prefix + ids for ids in encoded]
    tail = bool(stride or start or joining is None) or max(map(len, rows)) <= room
    windows = [w for ids in rows for w in _windows(ids, start, room, stride or room, tail)][:limit]
    words = _words(documents, encoded, windows)
    if not windows:
        raise ValueError(f"the text has {sum(map(len, rows))} tokens; at least two are needed to score one")
    if unit == "word" and words is None:
        raise ValueError("a figure per word needs a text of which every token is scored: "
                         "pass bos='window', or bos='text' with a stride below the context, and no limit")  # fmt: skip
    protocol = Protocol(source=source, sha256=_sha256(documents), joining=joining if source.endswith("documents") else None,
                        documents=len(documents), tokenizer=_tokenizer(model, documents), bos=bos if prefix else "none",
                        context=context, stride=stride or room, tail="scored" if tail else "dropped", unit=unit, limit=limit)  # fmt: skip
    return _measure(model, windows, words, protocol, batch_size)
