"""How the next token is chosen from logits.

Everything is a pure function. The noise of a draw depends on (seed, absolute position, token id) and on nothing else, so a text does
not depend on what it was batched with, how its prompt was split into calls, or where it was computed; and a drafter that knows the
seed can draw what the model will draw.

Shapes: B rows, V vocabulary, N tokens so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASK64 = (1 << 64) - 1
WEYL, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the constants of SplitMix64


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    temperature: divides the logits; 0 takes the best token. top_k: only the k best. top_p: only the smallest set of best tokens whose
    probabilities reach p (nucleus). min_p: only tokens with at least p times the best one's probability. repetition_penalty: divides
    positive and multiplies negative logits of tokens that the prompt or the text already has. seed: one for all rows or one a row;
    rows with the same seed, position and logits draw the same token. Raises ValueError for values out of range, and for filters at
    temperature 0, where they could do nothing.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        found = [f"{name} must be {what}, got {getattr(self, name)!r}" for name, fits, what in self._ranges() if not fits]
        filters = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if self.temperature == 0 and filters:
            found.append(f"{', '.join(filters)} does nothing at temperature 0, which takes the best token; set a temperature above 0")
        if found:
            raise ValueError("; ".join(found))

    def _ranges(self) -> list[tuple[str, bool, str]]:
        return [
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1 or None"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1, or None"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "in 0..1 or None"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
        ]

    def seeds(self, rows: int) -> list[int]:
        """The seed of each row. Raises ValueError if there are seeds for another number of rows."""
        if isinstance(self.seed, int):
            return [self.seed] * rows
        if len(self.seed) != rows:
            raise ValueError(f"seed: {len(self.seed)} seeds for {rows} prompts; give one for each, or one for all")
        return list(self.seed)

    def distribution(self, logits: Tensor, history: Tensor | None = None) -> Tensor:
        """Logits [B, V] -> fp32 logits [B, V] of what is drawn from, -inf where a token is ruled out.

        history: [B, N] ids of prompt and text, -1 where there is none; needed for a repetition penalty. The order is transformers'.
        """
        logits = logits.float()
        if self.repetition_penalty != 1.0:
            assert history is not None, "a repetition penalty needs the history"
            logits = penalize_repetition(logits, history, self.repetition_penalty)
        if self.temperature not in (0.0, 1.0):
            logits = logits / self.temperature
        if self.top_k is not None:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p is not None:
            logits = keep_top_p(logits, self.top_p)
        if self.min_p is not None:
            logits = keep_min_p(logits, self.min_p)
        return logits

    def pick(self, logits: Tensor, seeds: Sequence[int], positions: Sequence[int], history: Tensor | None = None) -> Tensor:
        """Logits [B, V] -> token ids [B] int64.

        seeds, positions: of each row; a position is the place in the whole sequence that the token will have. history: see distribution.
        """
        logits = self.distribution(logits, history)
        if self.temperature == 0:
            return logits.argmax(-1)
        return (logits + gumbel(seeds, positions, logits.shape[-1], logits.device)).argmax(-1)


# ---- filters ------------------------------------------------------------------------------------------------------------------


def penalize_repetition(logits: Tensor, history: Tensor, penalty: float) -> Tensor:
    """Make tokens that are in a row's history [B, N] less likely (penalty > 1); -1 is padding (Keskar et al. 2019, arXiv:1909.05858)."""
    vocab = logits.shape[-1]
    seen = torch.zeros(logits.shape[0], vocab + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter_(1, torch.where(history < 0, vocab, history), True)[:, :vocab]
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """-inf for all but the k best tokens; ties with the last of them stay (Fan et al. 2018, arXiv:1805.04833)."""
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, float("-inf"))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """-inf for all but the best tokens that together reach probability p (Holtzman et al. 2019, arXiv:1904.09751)."""
    ascending, order = logits.sort()
    drop = ascending.softmax(-1).cumsum(-1) <= 1 - p
    drop[:, -1] = False
    return logits.masked_fill(drop.scatter(1, order, drop), float("-inf"))


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """-inf for tokens with less than p times the best one's probability (Nguyen et al. 2024, arXiv:2407.01082)."""
    chance = logits.softmax(-1)
    return logits.masked_fill(chance < p * chance.amax(-1, keepdim=True), float("-inf"))


# ---- noise --------------------------------------------------------------------------------------------------------------------


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device | str | None = None) -> Tensor:
    """Standard Gumbel noise, [B, V] fp64: adding it to logits makes argmax a draw from their softmax (Gumbel 1954).

    An element is a function of its row's seed and position and its token id. Any integers are seeds; they count modulo 2**64.
    """
    return -torch.log(-torch.log(uniform(seeds, positions, vocab, device)))


def uniform(seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device | str | None = None) -> Tensor:
    """[B, V] fp64 in the open interval (0, 1), each element on its own: SplitMix64 counted by token id (Steele et al. 2014, figure 17)."""
    streams = [_stream(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    start = torch.tensor([_signed(s) for s in streams], device=device)
    count = torch.arange(1, vocab + 1, device=device)
    bits = _mix(start[:, None] + count * _signed(WEYL))
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52  # 52 bits, so that neither 0 nor 1 comes out


def _stream(seed: int, position: int) -> int:
    """A start for the counter, far from that of any other seed or position."""
    return _mix_int(_mix_int(seed & MASK64) + position & MASK64)


def _mix_int(x: int) -> int:
    x = (x ^ (x >> 30)) * MIX1 & MASK64
    x = (x ^ (x >> 27)) * MIX2 & MASK64
    return x ^ (x >> 31)


def _mix(x: Tensor) -> Tensor:
    """The same on int64 tensors, whose products wrap around as two's complement."""
    x = (x ^ _shift_right(x, 30)) * _signed(MIX1)
    x = (x ^ _shift_right(x, 27)) * _signed(MIX2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own carries the sign."""
    return (x >> bits) & (MASK64 >> bits)


def _signed(x: int) -> int:
    """The int64 with the same bits."""
    return x - (1 << 64) if x >> 63 else x
