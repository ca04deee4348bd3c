"""Reports say what was found, how sure it is and what was not measured; the page needs nothing but itself."""

from __future__ import annotations

import copy
import io
import math
import random
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.eval.made import make_variant, measured_perplexity, protocol
from zoo.eval import write_report
from zoo.eval.changes import perplexity_change, speed_change, task_change
from zoo.eval.labels import overlap, place
from zoo.eval.pareto import Axis, Panel, Point, front, panels, pareto_chart
from zoo.eval.quantization import Quantized, pictures
from zoo.eval.report import print_table, render
from zoo.eval.results import Results, Variant
from zoo.eval.summary import NOT_MEASURED, Cell, number, size, summarize


def quantized_in(results: Results) -> dict[str, Quantized]:
    return pictures({v.name: v.modules for v in results.variants})


def cell(results: Results, title: str, name: str) -> Cell:
    summary = summarize(results)
    return next(c for c in summary.columns if c.title == title).cells[summary.names.index(name)]


# ---- differences --------------------------------------------------------------------------------------------------------------


def test_figures_stand_beside_their_change_and_noise(results: Results) -> None:
    assert cell(results, "Weights", "gptq-int4-g64").change == "7.53× smaller"
    found = cell(results, "Perplexity", "gptq-int3-g64")
    assert found.mood == "worse"
    assert "±" in found.change
    assert "paired over 12 windows" in found.note
    assert cell(results, "zoo_facts acc", "fp32").change.startswith("±")


def test_differences_within_the_noise_are_called_so(results: Results) -> None:
    found = cell(results, "zoo_facts acc", "rtn-int8")
    assert found.mood == "same"
    assert found.note.startswith("within 2 standard errors")


def test_pairing_by_document_removes_the_shared_noise(results: Results) -> None:
    base, same = results.variants[0], copy.deepcopy(results.variants[0])
    assert (paired := task_change(same, base, "zoo_facts", "acc")).stderr == 0
    assert "paired over 200 documents" in paired.how
    del same.measured["tasks"]["items"]
    unpaired = task_change(same, base, "zoo_facts", "acc")
    assert unpaired.stderr == pytest.approx(math.sqrt(2) * base.tasks["zoo_facts"]["stderr"]["acc"])
    assert "not paired" in unpaired.how


def test_figures_of_different_protocols_are_not_compared(results: Results) -> None:
    base, other = results.variants[0], results.variants[2]
    other.measured["perplexity"] = measured_perplexity(3.1, 0, 1, protocol(context=128))
    other.tasks["zoo_facts"]["shots"] = 5
    other.measured["speed"]["batch_size"] = 8
    assert "context 64 against 128" in perplexity_change(other, base).refused
    assert "shots 0 against 5" in task_change(other, base, "zoo_facts", "acc").refused
    assert "batch_size 1 against 8" in speed_change(other, base, "decode").refused
    for title in ("Perplexity", "zoo_facts acc", "Mean accuracy", "Decode"):
        found = cell(results, title, other.name)
        assert (found.change, found.mood) == ("", "")
        assert found.note.startswith("not compared")


def test_speeds_side_by_side_are_compared_round_by_round(results: Results) -> None:
    other = results.variants[2]
    assert "separate runs" in cell(results, "Decode", other.name).note
    other.measured["speed"]["ratio"] = {"baseline": "fp32", "decode": {"median": 2.0, "low": 1.9, "high": 2.1}}
    found = cell(results, "Decode", other.name)
    assert (found.change, found.mood) == ("2.00×", "better")
    other.measured["speed"]["ratio"]["decode"]["low"] = 0.9
    assert cell(results, "Decode", other.name).mood == "same"


def test_a_broken_model_is_neither_better_nor_the_same(results: Results) -> None:
    other = results.variants[2]
    other.perplexity = math.nan
    other.measured["perplexity"]["windows"] = [("nan", 63)] * 12
    found = cell(results, "Perplexity", other.name)
    assert (found.text, found.change, found.mood) == ("undefined", "", "")


# ---- what was not measured ----------------------------------------------------------------------------------------------------


def test_what_was_not_measured_says_so_and_is_never_zero(results: Results) -> None:
    for title in ("Weights", "Perplexity", "zoo_facts acc", "Mean accuracy", "Decode", "Peak memory"):
        found = cell(results, title, "broken")
        assert (found.text, found.value, found.change) == (NOT_MEASURED, None, "")


def test_columns_that_nobody_measured_are_listed(results: Results) -> None:
    for v in results.variants:
        v.disk_bytes = None
    summary = summarize(results)
    assert summary.absent == ["On disk"]
    assert "Not measured for any variant: On disk." in render(results, None, quantized_in(results))


@pytest.mark.parametrize("width", [60, 100, 250])
def test_the_console_shows_everything_at_any_width(results: Results, width: int) -> None:
    out = io.StringIO()
    print_table(results, Console(file=out, width=width))
    text = out.getvalue()
    assert all(len(line) <= width for line in text.splitlines() if "┃" in line or "│" in line)
    for part in ("Bits / weight", "Peak memory", "gptq-int4-g64", "7.53× smaller", "not measured", "a group of 48"):
        assert part in text
    assert "…" not in text


# ---- the page -----------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects what a page refers to and whether its elements are closed."""

    VOID = {"meta", "img", "br", "link", "input"}  # noqa: RUF012

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(results: Results, tmp_path: Path) -> None:
    written = write_report(results, tmp_path / "out")
    pictures = [f"heat_maps/{name}.png" for name in ("gptq-int4-g64", "rtn-int4-g64")]
    assert [p.relative_to(tmp_path / "out").as_posix() for p in written] == ["report.html", "pareto.png", *pictures]
    text = written[0].read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert [link[:22] for link in page.links] == ["data:image/png;base64,"] * 3
    assert "http" not in text
    assert "@import" not in text


def test_texts_are_escaped(results: Results) -> None:
    text = render(results, None, quantized_in(results))
    assert "GPTQ on a &lt;small&gt; model" in text
    assert "A &lt;b&gt;processor&lt;/b&gt;" in text


def test_the_page_holds_every_detail(results: Results) -> None:
    text = render(results, None, quantized_in(results))
    for part in ("layers.0:30.mlp.down", "layers.2.mlp.down", "0.0330", "sha256", "cpu.logical_cores", "VmHWM", "device: cpu",
                 "a group of 48 does not divide 576", "28,311,552", "31.50"):  # fmt: skip
        assert part in text, part


def test_a_single_variant_makes_a_report_without_a_chart(tmp_path: Path) -> None:
    (tmp_path / "pareto.png").write_bytes(b"beside a report it is of an earlier run, else somebody's own")
    alone = Results(environment={}, variants=[Variant(name="only")])
    for left in (["pareto.png", "report.html"], ["report.html"]):
        assert [p.name for p in write_report(alone, tmp_path)] == ["report.html"]
        assert sorted(p.name for p in tmp_path.iterdir()) == left
    assert "No chart" in (tmp_path / "report.html").read_text()


# ---- the chart ----------------------------------------------------------------------------------------------------------------


def test_there_is_a_panel_for_each_pair_that_was_measured(results: Results) -> None:
    assert [(p.y.label, p.x.label) for p in panels(results)] == [
        ("Perplexity", "Weights in memory, MiB"),
        ("Perplexity", "Decode, tokens a second"),
        ("Mean accuracy, %", "Weights in memory, MiB"),
        ("Mean accuracy, %", "Decode, tokens a second"),
    ]
    assert pareto_chart(results) is not None
    for v in results.variants:
        v.decode_tokens_per_s = None
        v.tasks = {}
    assert len(list(panels(results))) == 1


def test_what_is_infinite_is_left_out_of_the_chart(results: Results) -> None:
    results.variants[1].perplexity = math.inf
    first = next(panels(results))
    assert "rtn-int8" not in [p.name for p in first.points]
    assert pareto_chart(results) is not None


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12), st.booleans(), st.booleans())
def test_the_front_is_what_nothing_beats(places: list[tuple[int, int]], less_x: bool, less_y: bool) -> None:
    points = [Point(str(i), x, y) for i, (x, y) in enumerate(places)]
    panel = Panel(Axis("x", less_x, lambda r, v: 0), Axis("y", less_y, lambda r, v: 0), points)

    def cost(p: Point) -> tuple[float, float]:
        return p.x * (1 if less_x else -1), p.y * (1 if less_y else -1)

    def beats(a: Point, b: Point) -> bool:
        return cost(a) != cost(b) and cost(a)[0] <= cost(b)[0] and cost(a)[1] <= cost(b)[1]

    best = {cost(p) for p in points if not any(beats(q, p) for q in points)}
    assert {cost(p) for p in front(panel)} == best
    assert len(front(panel)) == len(best), "equal points stand for each other"


@pytest.mark.parametrize("seed", range(5))
def test_labels_do_not_cover_each_other(seed: int) -> None:
    draw = random.Random(seed)
    anchors = [(draw.uniform(50, 750), draw.uniform(50, 550)) for _ in range(8)] + [(400, 300), (404, 301), (398, 306)]
    sizes = [(draw.uniform(40, 120), 14.0) for _ in anchors]
    boxes = place(anchors, sizes, (0, 0, 800, 600), 10)
    for i, a in enumerate(boxes):
        assert a[2] - a[0] == pytest.approx(sizes[i][0])
        assert a[0] >= 0
        assert a[2] <= 800
        assert sum(overlap(a, b) for b in boxes[:i]) == 0


# ---- numbers ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(18.5099, "18.51"), (0.0123456, "0.01235"), (420.0, "420.0"), (1234.5, "1,234"), (123456789.0, "1.235e+08"), (math.inf, "∞")],
)
def test_numbers_have_four_figures(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (68_000_000, "64.8 MiB"), (2**40, "1 TiB")])
def test_sizes_have_binary_units(value: int, text: str) -> None:
    assert size(value) == text


def test_a_variant_of_many_tasks_has_a_column_each() -> None:
    first, second = (
        make_variant(name, bits, 3, 0, 0.5, 10)
        for name, bits in (
            (
                "a",
                16,
            ),
            ("b", 8),
        )
    )
    titles = [c.title for c in summarize(Results(environment={}, variants=[first, second])).columns]
    assert [t for t in titles if "acc" in t] == ["zoo_facts acc", "zoo_piqa acc", "Mean accuracy"]
