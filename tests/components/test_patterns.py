"""Patterns against masks that are written out token by token, their facts, and packed documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.components import registry
from zoo.components.contracts import NoCache, Pattern, Step, Tokens, View
from zoo.components.kernel.sdpa import plain
from zoo.components.registry import Part
from zoo.components.spec import check, dump, load
from zoo.model import MixerSpec

N = 24
WRITTEN: dict[str, Callable[[int, int], bool]] = {
    "full": lambda q, k: True,
    "causal": lambda q, k: k <= q,
    "window": lambda q, k: q - 4 < k <= q,
    "nearby": lambda q, k: abs(q - k) <= 3,
    "chunked": lambda q, k: k <= q and k // 4 == q // 4,
    "dilated": lambda q, k: k in (q, q - 2, q - 4),
    "prefix_lm": lambda q, k: k <= q or k < 4,
    "sinks": lambda q, k: k <= q and (k < 2 or k > q - 4),
    "document": lambda q, k: True,
    "all_of": lambda q, k: k <= q and k // 8 == q // 8 and k > q - 3,
    "any_of": lambda q, k: q - 3 < k <= q or k in (q, q - 4, q - 8),
}


def parts() -> list[Part]:
    return registry.parts("pattern")


def pattern(data: object) -> Pattern:
    return load(Pattern, data)


SEGMENT = torch.arange(N) // 5


def seen(p: Pattern, count: int = N, segment: Tensor | None = None) -> Tensor:
    pos, documents = torch.arange(count)[None], None if segment is None else segment[None]
    return p.mask(Step.of(pos, documents), View({}, pos, ksegment=documents))[0, 0]


@pytest.mark.parametrize("part", parts(), ids=lambda p: p.name)
def test_mask_is_as_written(part: Part) -> None:
    want = torch.tensor([[WRITTEN[part.name](q, k) for k in range(N)] for q in range(N)])
    assert torch.equal(seen(part.small()), want)  # pyright: ignore[reportArgumentType]


FACTS = [
    *[p.small() for p in parts()],
    pattern({"name": "all_of", "patterns": ["full", "causal"]}),
    pattern({"name": "all_of", "patterns": ["causal", "document"]}),
    pattern({"name": "any_of", "patterns": ["causal", {"name": "window", "size": 3}]}),
    pattern({"name": "any_of", "patterns": [{"name": "window", "size": 3}, {"name": "window", "size": 5}]}),
    pattern({"name": "any_of", "patterns": ["full", {"name": "window", "size": 3}]}),
    pattern({"name": "any_of", "patterns": ["causal", "document"]}),
    pattern({"name": "any_of", "patterns": [{"name": "prefix_lm", "length": 3}, {"name": "chunked", "size": 3}]}),
]


@pytest.mark.parametrize("p", FACTS, ids=lambda p: p.key[:60])
def test_facts_are_true(p: Pattern) -> None:
    """Segments only take keys away from what the mask without them shows, or (any_of) are not counted on by a fact."""
    mask, back = seen(p), torch.arange(N)[:, None] - torch.arange(N)
    if p.causal:
        assert not (mask & (back < 0)).any()
    if p.separates:
        assert not (seen(p, segment=SEGMENT) & (SEGMENT[:, None] != SEGMENT)).any()
    if p.window is not None:
        assert not (mask & ((back < 0) | (back >= p.window))).any()
    if p.whole:
        allowed = (back >= 0) if p.causal else torch.ones_like(mask)
        assert torch.equal(mask, allowed if p.window is None else allowed & (back < p.window))


@pytest.mark.parametrize(("patterns", "any_of", "all_of"), [
    (["causal", "document"], False, True),
    (["document", "document"], True, True),
    (["causal", "full"], False, False),
    (["causal", {"name": "any_of", "patterns": ["document", "causal"]}], False, False),
])  # fmt: skip
def test_documents_are_apart_where_some_or_every_part_keeps_them_so(patterns: list[Any], any_of: bool, all_of: bool) -> None:
    assert pattern({"name": "any_of", "patterns": patterns}).separates == any_of
    assert pattern({"name": "all_of", "patterns": patterns}).separates == all_of


def test_sdpa_takes_no_short_cut_past_a_pattern_that_hides_more() -> None:
    pos = torch.arange(8)[None]
    step, view = Step.of(pos), View({}, pos, aligned=True)
    assert plain(step, view, pattern("causal")) == "causal"
    assert plain(step, view, pattern("full")) == "full"
    for p in parts():
        if p.name not in ("causal", "full", "window"):
            assert plain(step, view, p.small()) is None, p.name  # pyright: ignore[reportArgumentType]


def test_operators_compose() -> None:
    both, either = pattern("causal") & pattern({"name": "chunked", "size": 3}), pattern("causal") | pattern("full")
    assert torch.equal(seen(both), seen(pattern({"name": "chunked", "size": 3})))
    assert seen(either).all()
    assert load(Pattern, dump(both)) == both


def test_mistakes_are_named() -> None:
    assert check(pattern({"name": "all_of", "patterns": []})) == ["patterns: needs at least one pattern"]
    nested = pattern({"name": "any_of", "patterns": ["causal", {"name": "window", "size": 0}]})
    assert check(nested) == ["patterns.1.size: a window holds at least the token itself, got 0"]


@pytest.mark.parametrize("restart", [True, False], ids=["restarting", "running on"])
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex", "flash_v2"])
@torch.no_grad()
def test_packed_documents_equal_each_document_alone(kernel: str, restart: bool) -> None:
    spec = load(MixerSpec, {"projection": {"name": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8}, "position": "rope",
                            "pattern": {"name": "all_of", "patterns": ["causal", "document"]}, "kernel": kernel})  # fmt: skip
    mix, lengths = spec.build(32, 0), [5, 1, 6]
    x = torch.randn(1, sum(lengths), 32)
    pos = torch.cat([torch.arange(n) for n in lengths]) if restart else torch.arange(sum(lengths))
    segment = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    got = mix(x, Step.of(pos[None], segment), NoCache())
    for i, part in enumerate(x.split(lengths, 1)):
        alone = mix(part, Step.plain(0, 1, part.shape[1]), NoCache())
        torch.testing.assert_close(got[:, segment[0] == i], alone, rtol=1e-4, atol=1e-5)


def test_prefixes_of_a_length_per_row_are_segments() -> None:
    p, pos = pattern({"name": "any_of", "patterns": ["causal", "document"]}), torch.arange(6).expand(2, -1)
    segment = torch.where(torch.arange(6) < torch.tensor([[2], [4]]), 0, -1)
    mask = p.mask(Step.of(pos, segment), View({}, pos, ksegment=segment))[:, 0]
    for row, length in enumerate((2, 4)):
        assert torch.equal(mask[row], seen(pattern({"name": "prefix_lm", "length": length}), 6))


def test_a_cache_without_documents_is_an_error() -> None:
    where = torch.zeros(1, 2, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="without a cache"):
        pattern("document").allows(Tokens(where, where), Tokens(where.mT, None))
