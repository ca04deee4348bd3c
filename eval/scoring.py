"""Log-likelihoods of tokens under a model: the one computation below perplexity and lm-eval.

Everything runs through the cache of the model's own policy, so a cache that loses precision is judged with the rest.

Shapes: B rows, T tokens, M model width, V vocabulary, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from zoo.model import Model

LOGIT_ELEMENTS = 1 << 24  # fp32 logits held at once: 64 MiB
WORTH_SHARING = 32  # tokens that sharing a context must save before a second, shorter pass pays

Tokens = tuple[int, ...]


def score(model: Model, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [N, M], targets [N] int64 -> log-probabilities [N] fp32 (nats) and whether each target is the likeliest token [N] bool.

    The head works on slices, so [N, V] logits are never held at once.
    """
    vocab = getattr(model.spec.embed, "vocab", None) or hidden.shape[-1]
    rows = max(1, LOGIT_ELEMENTS // vocab)
    parts = [_score(model.head(h), t) for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)]
    return torch.cat([p for p, _ in parts]), torch.cat([g for _, g in parts])


def _score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    log_probability = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
    return log_probability, logits.argmax(-1) == targets


def run_rows(model: Model, rows: Sequence[Sequence[int]], cache: Any) -> tuple[Tensor, Tensor]:
    """Token rows of any lengths, padded on the right, behind what the cache holds -> ids [B, T] and hidden states [B, T, M]."""
    lengths = [len(row) for row in rows]
    width = max(lengths)
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=model.device)
    step = model.step(ids, lengths if min(lengths) < width else None, None, cache)
    hidden = model.hidden(ids, step, cache)
    cache.commit()
    return ids, hidden


# ---- continuations of contexts -----------------------------------------------------------------------------------------------


@dataclass
class Row:
    """Input ids, and for each request (by index) the tokens to score; the last of them is what the row's last id predicts."""

    ids: Tokens
    wanted: list[tuple[int, Tokens]] = field(default_factory=list)


@dataclass
class Tree:
    """A trunk that is run once, and branches that go on where it ends."""

    trunk: Row
    branches: list[Row] = field(default_factory=list)

    @property
    def longest(self) -> int:
        return len(self.trunk.ids) + max((len(b.ids) for b in self.branches), default=0)


def continuations(model: Model, pairs: Sequence[tuple[Tokens, Tokens]], batch_size: int) -> Iterator[tuple[int, float, bool]]:
    """Score continuations of contexts, both token ids and not empty; a context that several pairs share is run once.

    Yields (index of the pair, summed log-probability in nats, whether greedy decoding would give the continuation), longest first.
    """
    trees = plan(pairs)
    for start in range(0, len(trees), batch_size):
        yield from _run(model, trees[start : start + batch_size], batch_size)


def plan(pairs: Sequence[tuple[Tokens, Tokens]]) -> list[Tree]:
    """Pairs with the same context become one tree where that saves enough; the longest trees come first, so memory runs out at once."""
    order = sorted(range(len(pairs)), key=lambda i: pairs[i][0])
    trees: list[Tree] = []
    for context, same in groupby(order, key=lambda i: pairs[i][0]):
        group = [(i, pairs[i][1]) for i in same]
        saved = len(context) * (len({c[:-1] for _, c in group}) - 1)
        trees += [_branched(context, group)] if saved >= WORTH_SHARING else _straight(context, group)
    return sorted(trees, key=lambda tree: -tree.longest)


def _branched(context: Tokens, group: Sequence[tuple[int, Tokens]]) -> Tree:
    branches: dict[Tokens, Row] = {}
    for i, c in group:
        if len(c) > 1:
            branches.setdefault(c[:-1], Row(c[:-1])).wanted.append((i, c[1:]))
    return Tree(Row(context, [(i, c[:1]) for i, c in group]), list(branches.values()))


def _straight(context: Tokens, group: Sequence[tuple[int, Tokens]]) -> list[Tree]:
    """One tree a distinct input: continuations that differ in their last token only share it."""
    rows: dict[Tokens, Row] = {}
    for i, c in group:
        rows.setdefault(c[:-1], Row(context + c[:-1])).wanted.append((i, c))
    return [Tree(row) for row in rows.values()]


@torch.inference_mode()
def _run(model: Model, trees: Sequence[Tree], batch_size: int) -> list[tuple[int, float, bool]]:
    cache = model.new_cache(len(trees))
    scored = _score_rows(model, [tree.trunk for tree in trees], cache)
    branches = [(row, branch) for row, tree in enumerate(trees) for branch in tree.branches]
    for start in range(0, len(branches), batch_size):
        part = branches[start : start + batch_size]
        rest = _score_rows(model, [branch for _, branch in part], cache.fork([row for row, _ in part]))
        scored |= {i: (scored[i][0] + x, scored[i][1] and greedy) for i, (x, greedy) in rest.items()}
    return [(i, x, greedy) for i, (x, greedy) in scored.items()]


def _score_rows(model: Model, rows: Sequence[Row], cache: Any) -> dict[int, tuple[float, bool]]:
    """Run one batch; request index -> (summed log-probability, whether all its tokens are the likeliest)."""
    _, hidden = run_rows(model, [row.ids for row in rows], cache)
    wanted = [(i, b, len(row.ids), tokens) for b, row in enumerate(rows) for i, tokens in row.wanted]
    at_row = [b for _, b, _, tokens in wanted for _ in tokens]
    at_column = [t for _, _, end, tokens in wanted for t in range(end - len(tokens), end)]
    targets = torch.tensor([token for _, _, _, tokens in wanted for token in tokens], device=hidden.device)
    log_probability, greedy = score(model, hidden[at_row, at_column], targets)
    sizes = [len(tokens) for _, _, _, tokens in wanted]
    sums = [float(x.double().sum()) for x in log_probability.cpu().split(sizes)]
    hits = [bool(x.all()) for x in greedy.cpu().split(sizes)]
    return {i: (x, hit) for (i, _, _, _), x, hit in zip(wanted, sums, hits, strict=True)}
