"""What reports show of quantized modules: the table, the heat map, the page of one quantization and the section of a card."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.eval.made import made_row
from tests.eval.test_report import Page, quantized_in
from tests.quantize.models import small
from zoo.eval import write_report
from zoo.eval.card import Run
from zoo.eval.grids import Grid
from zoo.eval.heat_map import heat_map, lines, short
from zoo.eval.quantization import common, markdown, module_grid, pictures, spans, write_quantization_report
from zoo.eval.report import render
from zoo.eval.results import Results, variant
from zoo.quantize import Report, quantize
from zoo.quantize.error_map import ErrorMap, error_map
from zoo.quantize.report import grouped, rows_of

EXPERTS = [made_row(f"layers.{i}.mlp.experts.{e}.up", 0.01 * (e + 1)) for i in range(3) for e in range(40)]
STARVED = made_row("layers.1.mlp.experts.40.up", None, fallback="rtn: no tokens")
DENSE = [made_row(f"layers.{i}.mixer.projection.q", 0.02) for i in range(4)]
ROWS = [*DENSE, *EXPERTS, STARVED, made_row("head.out", 0.005)]


def column(grid: Grid, heading: str) -> list[str]:
    return [row[grid.headings.index(heading)][0] for row in grid.rows]


# ---- the table -----------------------------------------------------------------------------------------------------------------


def test_a_row_has_module_bits_error_tokens_damping_and_fallback() -> None:
    grid = module_grid(grouped(rows_of(ROWS)))
    assert len(grid.rows) == 4 + 3 + 1
    assert column(grid, "module")[:4] == [f"layers.{i}.mixer.projection.q" for i in range(4)]
    assert column(grid, "output error")[5] == "0.2050 (worst 0.4000)"
    assert column(grid, "fallback")[5] == "rtn: no tokens (1 of 41)"
    assert column(grid, "tokens")[5] == "0 to 8,192"
    assert column(grid, "damping")[:2] == ["0.01", "0.01"]
    assert column(grid, "bits / weight")[0] == "4.25"
    assert "notes" not in grid.headings  # nothing stands there
    assert common(grouped(rows_of(ROWS))) == "method gptq, bits 4, group_size 64"


def test_settings_that_differ_stand_in_the_rows() -> None:
    other = made_row("layers.0.mlp.down", 0.1) | {"settings": {"bits": 8, "group_size": 64}}
    groups = grouped(rows_of([*DENSE, other]))
    assert common(groups) == "method gptq, group_size 64"
    assert column(module_grid(groups), "settings")[-2:] == ["bits 4", "bits 8"]


# ---- the heat map --------------------------------------------------------------------------------------------------------------


def found(rows: list[dict]) -> ErrorMap:
    errors = error_map(rows_of(rows))
    assert errors is not None
    return errors


def test_experts_have_a_line_for_the_mean_and_one_for_the_worst() -> None:
    assert [name for name, _ in lines(found(ROWS))] == ["mixer.projection.q", "mlp.experts.*.up  mean", "mlp.experts.*.up  worst"]


def test_the_picture_shows_the_errors(tmp_path: Path) -> None:
    """A worse module is darker, and a layer without one is grey."""
    png = heat_map(found([made_row("layers.0.mlp.up", 0.01), made_row("layers.2.mlp.up", 0.5)]))
    assert png is not None
    (tmp_path / "map.png").write_bytes(png)
    pixels = np.asarray(Image.open(tmp_path / "map.png").convert("RGB")).astype(int)
    colors = {tuple(c) for c in pixels.reshape(-1, 3)}
    assert {(253, 244, 236), (84, 29, 5), (230, 234, 239)} <= colors


@pytest.mark.parametrize("layers", [1, 16, 17, 126])
def test_any_number_of_layers_fits(layers: int, tmp_path: Path) -> None:
    png = heat_map(found([made_row(f"layers.{i}.mlp.up", 0.01 * (i + 1)) for i in range(layers)]))
    assert png is not None
    (tmp_path / "map.png").write_bytes(png)
    width, height = Image.open(tmp_path / "map.png").size
    assert 1000 < width < 3500
    assert 150 < height < 400


def test_nothing_lost_makes_no_picture() -> None:
    assert heat_map(found([made_row("layers.0.mlp.up", 0.0)])) is None
    assert heat_map(found([made_row("head.out", 0.1)])) is None


def test_pictures_of_one_comparison_have_one_scale() -> None:
    better, worse = ([made_row("layers.0.mlp.up", error)] for error in (0.01, 0.3))
    assert spans([rows_of(better), rows_of(worse)]) == {"output_error": (0.01, 0.3)}
    made = pictures({"better": better, "worse": worse, "converted": [{"conversion": "mha_to_mla"}]})
    assert made.keys() == {"better", "worse"}
    assert made["better"].png != made["worse"].png


@pytest.mark.parametrize(("value", "text"), [(0.1, "0.10"), (0.0123, "0.012"), (0.00012, "1.2e-4"), (0.0, "0.0"), (1.0, "1.0")])
def test_figures_in_cells_are_short(value: float, text: str) -> None:
    assert short(value) == text


# ---- pages, results and cards --------------------------------------------------------------------------------------------------


def test_the_page_folds_thousands_of_experts_and_the_results_have_each() -> None:
    made = variant("gptq", modules=ROWS)
    results = Results(environment={}, variants=[variant("baseline"), made])
    text = render(results, None, quantized_in(results))
    assert Page(text).open == []
    assert text.count("<tr><td>layers.") == 7
    assert f"{len(ROWS)} in 8 rows" in text
    assert "layers.1.mlp.experts.{0..40}.up" in text
    assert len(made.modules) == len(ROWS)
    assert made.error_map is not None
    assert ErrorMap.from_dict(json.loads(json.dumps(made.error_map))) == error_map(rows_of(ROWS))


def test_pictures_of_an_earlier_report_go(tmp_path: Path) -> None:
    both = [variant("a", modules=DENSE), variant("b", modules=DENSE)]
    write_report(Results(environment={}, variants=both), tmp_path)
    written = write_report(Results(environment={}, variants=both[:1]), tmp_path)
    assert [p.name for p in written] == ["report.html", "a.png"]
    assert [p.name for p in (tmp_path / "heat_maps").iterdir()] == ["a.png"]


def test_one_quantization_has_page_json_picture_and_a_section_in_the_readme(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A model\n")
    report = quantize(small(), "rtn", group_size=32, progress=False)
    written = write_quantization_report(report, tmp_path, "tiny")
    write_quantization_report(report, tmp_path, "tiny")  # again: nothing is said twice
    assert [p.name for p in written] == ["quantization_report.json", "quantization_report.html", "quantization_error.png", "README.md"]
    page = (tmp_path / "quantization_report.html").read_text()
    assert Page(page).open == []
    for words in ("14 modules quantized", "layers.1.mlp.down", "method rtn", "no multiple of 128", "It was to take about"):
        assert words in page, words
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("# A model\n\n## What the quantization lost\n")
    assert readme.count("## ") == 1
    assert "| `mlp.down` | 2 | 4.50 |" in readme
    assert "(quantization_error.png)" in readme
    assert rows_of(json.loads((tmp_path / "quantization_report.json").read_text())["rows"]) == list(report.rows)


def test_a_report_without_remarks(tmp_path: Path) -> None:
    report = Report(tuple(rows_of([made_row("head.out", 0.1)])), (), {}, 1.0)
    assert [p.name for p in write_quantization_report(report, tmp_path, "head")] == ["quantization_report.json", "quantization_report.html"]


def test_the_card_tells_of_kinds(tmp_path: Path) -> None:
    table = markdown(rows_of(ROWS))
    assert "| `mlp.experts.*.up` | 121 | 4.25 | 0.2050 | 0.4000 | 1 |" in table
    assert "| `head.out` | 1 |" in table
    results = Results(environment={}, variants=[variant("gptq", modules=[asdict(r) for r in rows_of(DENSE)])])
    write_report(results, tmp_path)
    assert Run(tmp_path, results, "gptq").files()["quantization_error.png"] == tmp_path / "heat_maps/gptq.png"
