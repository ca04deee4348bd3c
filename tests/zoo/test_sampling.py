"""Sampling: filters against transformers' own, noise against the distributions that it must have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from zoo.sampling import Sampling, gumbel, uniform

VOCAB = 50


def logits(rows: int = 3, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def theirs(sampling: Sampling) -> LogitsProcessorList:
    """transformers' processors in transformers' order."""
    s: Any = sampling
    wanted = [
        (s.repetition_penalty != 1.0, lambda: RepetitionPenaltyLogitsProcessor(s.repetition_penalty)),
        (s.temperature not in (0.0, 1.0), lambda: TemperatureLogitsWarper(s.temperature)),
        (s.top_k is not None, lambda: TopKLogitsWarper(s.top_k)),
        (s.top_p is not None, lambda: TopPLogitsWarper(s.top_p)),
        (s.min_p is not None, lambda: MinPLogitsWarper(s.min_p)),
    ]
    return LogitsProcessorList(make() for is_set, make in wanted if is_set)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_filters_equal_transformers(options):
    sampling = Sampling(**options)
    history = torch.randint(VOCAB, (3, 11), generator=torch.Generator().manual_seed(1))
    assert torch.equal(sampling.distribution(logits(), history), theirs(sampling)(history, logits()))  # type: ignore[arg-type]


def test_top_k_keeps_ties_as_transformers_does():
    tied = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    kept = Sampling(temperature=1.0, top_k=2).distribution(tied)
    assert torch.equal(kept, TopKLogitsWarper(2)(None, tied))  # type: ignore[arg-type]


def test_repetition_penalty_ignores_padding_and_other_rows():
    sampling = Sampling(repetition_penalty=1.5)
    history = torch.tensor([[4, 9, -1, -1], [7, 7, 8, 3]])
    both = sampling.distribution(logits(2), history)
    assert torch.equal(both[:1], theirs(sampling)(history[:1, :2], logits(2)[:1]))  # type: ignore[arg-type]
    assert torch.equal(both[1:], theirs(sampling)(history[1:], logits(2)[1:]))  # type: ignore[arg-type]
    assert both[0, 0] == logits(2)[0, 0]  # padding is not token 0, nor the last one
    assert both[0, -1] == logits(2)[0, -1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 1.0, "top_k": 0}, "top_k"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p"),
        ({"temperature": 1.0, "min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"top_p": 0.9}, "temperature above 0"),
    ],
)
def test_values_out_of_range_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        Sampling(**options)


def test_seeds_must_fit_the_rows():
    assert Sampling(seed=5).seeds(3) == [5, 5, 5]
    assert Sampling(seed=[1, 2]).seeds(2) == [1, 2]
    with pytest.raises(ValueError, match="2 seeds for 3 prompts"):
        Sampling(seed=[1, 2]).seeds(3)


def test_greedy_takes_the_first_of_the_best():
    tied = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    assert Sampling().pick(tied, [0, 0], [0, 0]).tolist() == [1, 0]


# ---- noise


def test_known_values():
    """The generator is SplitMix64, whose published outputs for seed 1234567 begin so; and the keyed values may never change."""
    from zoo.sampling import MASK64, WEYL, _mix_int

    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [_mix_int(1234567 + i * WEYL & MASK64) for i in (1, 2, 3)] == published
    assert [int(x * 2**52) for x in uniform([7], [3], 3)[0].tolist()] == KEYED


KEYED = [1250736241139525, 4421358954223485, 1700431585743381]  # computed from the definition in plain integers


def chi_square(counts: torch.Tensor, chances: torch.Tensor) -> float:
    """Standard deviations by which the statistic exceeds its mean."""
    expected = counts.sum() * chances
    freedom = int((expected > 0).sum()) - 1
    return float(((counts - expected) ** 2 / expected)[expected > 0].sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.6, "top_k": 12}], ids=str)
def test_frequencies_are_the_softmax(vary, options):
    n = 40_000
    sampling, one = Sampling(**options), logits(1, seed=5)
    seeds, positions = (range(n), [17] * n) if vary == "seed" else ([17] * n, range(n))
    picked = sampling.pick(one.expand(n, -1), seeds, positions)
    chances = sampling.distribution(one)[0].double().softmax(-1)
    assert abs(chi_square(picked.bincount(minlength=VOCAB).double(), chances)) < 5


@pytest.mark.parametrize("lag", [("seed", 1), ("position", 1), ("both", 1), ("seed", 1 << 32), ("swap", 0)], ids=str)
def test_draws_are_independent(lag):
    """Pairs of draws at neighbouring keys fill the square evenly; seed and position may not stand for each other."""
    what, by = lag
    n, bins = 50_000, 8
    seeds = list(range(1, n + 1))
    positions = [3 * s + 1 for s in seeds]
    moved = {
        "seed": ([s + by for s in seeds], positions),
        "position": (seeds, [p + by for p in positions]),
        "both": ([s + by for s in seeds], [p - by for p in positions]),
        "swap": (positions, seeds),
    }[what]
    a, b = (uniform(s, p, 2)[:, 1] for s, p in ((seeds, positions), moved))
    cell = (a * bins).long() * bins + (b * bins).long()
    assert abs(chi_square(cell.bincount(minlength=bins**2).double(), torch.full((bins**2,), 1 / bins**2).double())) < 5


def test_tokens_of_one_draw_are_independent():
    u = uniform([11], [4], 200_001)[0]
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    bins = 10
    cell = (u[:-1] * bins).long() * bins + (u[1:] * bins).long()
    assert abs(chi_square(cell.bincount(minlength=bins**2).double(), torch.full((bins**2,), 1 / bins**2).double())) < 5
    g = gumbel([11], [4], 200_000)[0]
    assert abs(float(g.mean()) - 0.5772) < 0.01
    assert abs(float(g.var()) - math.pi**2 / 6) < 0.03


def test_a_row_does_not_depend_on_its_batch():
    sampling, many = Sampling(temperature=0.9), logits(6)
    seeds, positions = [3, 1, 4, 1, 5, -9], [2, 6, 5, 3, 5, 8]
    together = sampling.pick(many, seeds, positions)
    alone = [int(sampling.pick(many[i : i + 1], [seeds[i]], [positions[i]])) for i in range(6)]
    assert together.tolist() == alone
    assert torch.equal(gumbel([3], [2], 5), gumbel([3, 8], [2, 2], VOCAB)[:1, :5])  # nor on the size of the vocabulary


def test_same_key_same_draw_whatever_the_seed_is_congruent_to():
    assert torch.equal(uniform([-1], [0], 4), uniform([2**64 - 1], [0], 4))
    assert not torch.equal(uniform([0], [0], 4), uniform([1], [0], 4))


@pytest.mark.gpu
def test_noise_is_the_same_on_a_gpu():
    keys = ([1, 2, 3], [4, 5, 6], VOCAB)
    assert torch.equal(uniform(*keys), uniform(*keys, "cuda").cpu())
    assert torch.equal(
        Sampling(temperature=1.0).pick(logits(), *keys[:2]), Sampling(temperature=1.0).pick(logits().cuda(), *keys[:2]).cpu()
    )
