"""The report of a quantization: a row for each module, the errors by kind and layer, experts told together."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.quantize.models import MOE, ids, small
from zoo.quantize import quantize
from zoo.quantize.error_map import ErrorMap, error_map, place
from zoo.quantize.report import Report, Row, grouped, rows_of


def row(module: str, error: float | None = 0.1, tokens: int | None = 100, bits: int = 4, weights: int = 64, **facts: Any) -> Row:
    return Row(module, "gptq", {"bits": bits, "group_size": 32}, weights, bits + 0.5, 0.25, tokens, error, 0.5, facts)


UNEQUAL = [
    row("layers.0.mixer.projection.q", 0.1),
    row("layers.0.mlp.up", 0.2),
    row("layers.2.mixer.projection.q", 0.3),
    row("layers.2.mixer.projection.kv_up.0", 0.5),
    row("layers.2.mlp.experts.0.up", 0.2),
    row("layers.2.mlp.experts.10.up", 0.6),
    row("layers.2.mlp.experts.11.up", None, 0, fallback="rtn: no tokens"),
    row("head.out", 0.01),
]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("layers.12.mlp.down", (12, "mlp.down")),
        ("layers.0.mlp.experts.127.w1", (0, "mlp.experts.*.w1")),
        ("layers.3.mixer.projection.kv_up.1", (3, "mixer.projection.kv_up.*")),
        ("head.out", None),
    ],
)
def test_places(path: str, expected: tuple[int, str] | None) -> None:
    assert place(path) == expected


def test_the_map_has_mean_and_worst_of_a_layers_experts_and_gaps_where_layers_differ() -> None:
    found = error_map(UNEQUAL)
    assert found is not None
    assert (found.measure, found.layers, found.outside) == ("output_error", 3, {"head.out": 0.01})
    assert {kind.kind: (kind.modules, kind.mean, kind.worst) for kind in found.rows} == {
        "mixer.projection.q": (1, (0.1, None, 0.3), (0.1, None, 0.3)),
        "mixer.projection.kv_up.*": (1, (None, None, 0.5), (None, None, 0.5)),
        "mlp.up": (1, (0.2, None, None), (0.2, None, None)),
        "mlp.experts.*.up": (3, (None, None, 0.4), (None, None, 0.6)),
    }
    assert [kind.kind.partition(".")[0] for kind in found.rows] == ["mixer", "mixer", "mlp", "mlp"]
    assert found.span() == (0.1, 0.6)
    assert ErrorMap.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_without_data_the_map_is_of_the_weights() -> None:
    found = error_map([row("layers.0.mlp.up", None), row("head.out", None)])
    assert found is not None
    assert (found.measure, found.rows[0].mean, found.outside) == ("weight_error", (0.25,), {"head.out": 0.25})
    assert error_map([]) is None


def test_errors_that_are_none_of_numbers_are_gaps() -> None:
    found = error_map([row("layers.0.mlp.up", math.nan), row("layers.1.mlp.up", 0.5)])
    assert found is not None
    assert found.rows[0].mean == (None, 0.5)


def test_the_experts_of_a_layer_are_one_group_as_long_as_they_are_alike() -> None:
    rows = [*UNEQUAL, row("layers.2.mlp.experts.12.up", 0.3, bits=8)]
    groups = {group.module: group for group in grouped(rows)}
    assert len(groups) == len(rows) - 2
    experts = groups["layers.2.mlp.experts.{0,10,11}.up"]
    assert (experts.tokens, experts.errors("output_error"), experts.notes()) == ("0 to 100", "0.4000 (worst 0.6000)",
                                                                                "fallback rtn: no tokens (1 of 3)")  # fmt: skip
    assert groups["layers.2.mlp.experts.12.up"].bits_per_weight == 8.5
    assert groups["head.out"].errors("output_error") == "0.0100"


@pytest.mark.parametrize(
    ("tokens", "said"),
    [([None], "-"), ([None, None], "-"), ([0], "0"), ([None, 7], "0 to 7"), ([1200, 1200], "1,200"), ([3, 0, 40], "0 to 40")],
)
def test_tokens_of_experts_without_data_are_not_0(tokens: list[int | None], said: str) -> None:
    (group,) = grouped([row(f"layers.0.mlp.experts.{i}.up", tokens=count) for i, count in enumerate(tokens)])
    assert group.tokens == said


def test_the_json_has_every_row_and_the_table_one_for_a_layers_experts() -> None:
    report = Report(tuple(UNEQUAL), ("embed.weight",), {}, 1.0)
    data = json.loads(report.to_json())
    assert rows_of(data["rows"]) == UNEQUAL
    assert ErrorMap.from_dict(data["error_map"]) == error_map(UNEQUAL)
    assert report.table().row_count == len(UNEQUAL) - 2
    assert report.totals["fallbacks"] == 1


def test_rows_of_other_kinds_are_passed_over() -> None:
    assert rows_of([{"conversion": "to mla", "where": "layers.0"}, {"module": "layers.0.mlp.up"}]) == []


def test_a_mixture_of_experts() -> None:
    report = quantize(small(MOE), "gptq", group_size=32, calibration=ids(), progress=False)
    found = error_map(report.rows)
    assert found is not None
    kinds = {kind.kind: kind for kind in found.rows}
    assert kinds["mlp.experts.*.gate"].modules == 8
    assert all(mean < worst for kind in ("gate", "up", "down") for mean, worst in
               zip(kinds[f"mlp.experts.*.{kind}"].mean, kinds[f"mlp.experts.*.{kind}"].worst, strict=True) if mean and worst)  # fmt: skip
    assert len(report.rows) == 2 * (4 + 3 * 8)
    assert len(grouped(report.rows)) == 2 * (4 + 3)
