"""The catalogue says of every part what asking the part gives."""

from __future__ import annotations

import inspect

import pytest

from zoo.catalogue import catalogue
from zoo.components import registry
from zoo.components.registry import Part
from zoo.declare import parts
from zoo.part_facts import cost, facts, limits, mixer, refusals


def part(family: str, name: str) -> Part:
    return registry.get(family, name)


@pytest.fixture(scope="module")
def text() -> str:
    return catalogue()


def test_every_part_has_its_section_with_doc_and_source(text: str) -> None:
    sections = {(f.split("\n")[0], s.split("`")[0]): s for f in text.split("\n## ")[1:] for s in f.split("\n### `")[1:]}
    assert set(sections) == {(p.family, p.name) for p in parts()}
    for p in parts():
        section = sections[p.family, p.name]
        assert inspect.getdoc(p.spec) in section
        assert f"Source: {p.source}." in section
        for line in refusals(p):
            assert f"\n* {line}" in section


def test_facts_are_what_differs_from_the_family() -> None:
    assert facts(part("kernel", "eager")) == ["softmax", "masks"]
    assert facts(part("kernel", "sage1")) == ["rounding 0.03"]
    assert facts(part("projection", "delta")) == ["provides beta"]
    assert facts(part("pattern", "full")) == ["whole"]
    assert facts(part("norm", "rms")) == []


def test_limits_are_the_reasons_without_the_number() -> None:
    assert limits(part("pattern", "window")) == {"size": ["a window holds at least the token itself"]}
    assert limits(part("projection", "gqa"))["kv_heads"] == ["must be at least 1", "heads (4) must be a multiple of kv_heads (N)"]
    assert limits(part("norm", "identity")) == {}


def test_refusals_are_of_the_part_and_not_of_what_stands_beside_it() -> None:
    assert refusals(part("position", "rope")) == []
    assert any(line.startswith("kernel ") and "softcap" in line for line in refusals(part("position", "alibi")))
    assert "projection gqa_gated: has no use for gates, which the projection makes" in refusals(part("kernel", "sdpa"))
    assert any("needs a plain causal pattern, not this one" in line for line in refusals(part("cache", "h2o")))
    assert refusals(part("cache", "dense")) == []


def test_every_mixer_part_goes_with_some_others() -> None:
    for axis in ("projection", "position", "pattern", "kernel"):
        assert [n for n in registry.names(axis) if mixer(axis, n) is None] == []


def test_costs_are_of_the_example() -> None:
    assert cost(part("linear", "dense")) == (
        f"{2 * 64 * 64:,} FLOP a token of a prompt, {2 * 64 * 64:,} FLOP to decode one, {2 * 64 * 64:,} bytes of weights read to decode one"
    )
    assert cost(part("kernel", "sdpa")) == f"{4 * 4 * 8 * 129 / 2:,.0f} FLOP a token of a prompt, {4 * 4 * 8 * 128:,} FLOP to decode one"
    assert cost(part("pattern", "causal")) == f"shows {128 * 129 // 2:,} of the {128 * 128:,} pairs of 128 tokens"
    assert cost(part("cache", "int8")) == "keeps 48 bytes of a token whose keys and values are 64 bytes in bfloat16"
    assert cost(part("experts", "loop")) == "runs 256 vectors for 128 tokens of 2 choices among 4 experts"
    assert cost(part("norm", "identity")) == ""
