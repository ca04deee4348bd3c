"""The results file: checked whole, written whole, and everything that was measured finds its place."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.eval.made import Pair
from zoo.components import spec as specs
from zoo.eval import compare_speed, describe_environment, evaluate, load_results, memory, peak_memory, perplexity, save_results
from zoo.eval.results import Results, ResultsError, Variant, check_results, check_target, variant, write_atomic


def test_results_survive_the_file(results: Results, tmp_path: Path) -> None:
    save_results(results, tmp_path / "new/results.json")
    again = load_results(tmp_path / "new/results.json")
    assert json.dumps(asdict(again)) == json.dumps(asdict(results))
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["results.json"]


def test_numbers_that_json_lacks_survive(results: Results, tmp_path: Path) -> None:
    results.variants[1].perplexity = math.inf
    results.variants[2].perplexity = math.nan
    save_results(results, tmp_path / "results.json")
    json.loads((tmp_path / "results.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    again = load_results(tmp_path / "results.json")
    assert again.variants[1].perplexity == math.inf
    assert again.variants[2].perplexity is not None
    assert math.isnan(again.variants[2].perplexity)


def test_only_results_are_replaced_by_results(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    check_target(path)
    save_results(results, path)
    check_target(path)
    for content in (b'{"model_type": "llama"}', b"[1]", b"{", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(FileExistsError, match=r"results\.json is there and holds no results, so it is not replaced"):
            check_target(path)
    with pytest.raises(FileExistsError, match="is a folder; give the name of a file in it"):
        check_target(tmp_path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_atomic(path, b"old")

    def fail(self: Path, content: bytes) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_every_mistake_is_named_with_its_place(results: Results) -> None:
    data = asdict(results)
    data["variants"][0]["perplexity"] = "low"
    data["variants"][1]["bitz"] = 4
    del data["environment"]
    with pytest.raises(ResultsError) as caught:
        check_results(data)
    assert "variants.0.perplexity: " in str(caught.value)
    assert "variants.1.bitz: " in str(caught.value)
    assert "environment: " in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"schema": 2}, "reads schema 1"), ({"variants": []}, "there are none"), ({"variants": [{"name": "a"}, {"name": "a"}]}, "a do not")],
)
def test_results_that_are_none_are_refused(results: Results, change: dict, message: str) -> None:
    with pytest.raises(ResultsError, match=message):
        check_results(asdict(results) | change)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    for content in ("{", "[]"):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(ResultsError, match=r"results\.json"):
            load_results(tmp_path / "results.json")


def test_measurements_find_their_place(tiny: Pair, prose: str, tmp_path: Path) -> None:
    model = tiny.ours
    with peak_memory() as peak:
        compared = compare_speed({"a": model, "b": model}, prompt_tokens=8, new_tokens=3, repeats=2)
    made = variant("b", perplexity=perplexity(model, prose[:500]), evaluation=evaluate(model, "zoo_facts", limit=6),
                   speed=compared.speeds["b"][0], ratio=compared.ratios[0], memory=memory(model), peak=peak, disk_bytes=5, spec=model.spec,
                   baseline=specs.override(model.spec, "layers.*.mixer.kernel=eager"), seconds={"load": 1.5})  # fmt: skip
    save_results(Results(environment=describe_environment(), variants=[Variant(name="a"), made]), tmp_path / "results.json")
    again = load_results(tmp_path / "results.json").variants[1]
    assert again.perplexity == pytest.approx(math.exp(again.measured["perplexity"]["nll"]))
    assert again.metrics("zoo_facts").keys() == {"acc", "acc_norm"}
    assert len(again.measured["tasks"]["items"]["zoo_facts"]["acc"]) == again.tasks["zoo_facts"]["n"] == 6
    assert again.measured["speed"]["ratio"]["baseline"] == "a"
    assert (again.bytes, again.bits_per_weight, again.peak_bytes) == (memory(model).bytes, 32, peak.peak)
    assert again.spec_diff == [("layers.0:2.mixer.kernel", "eager", "sdpa")]
    assert again.seconds == {"load": 1.5}


def test_what_was_not_measured_is_none() -> None:
    empty = variant("a")
    figures = ("perplexity", "bytes", "disk_bytes", "bits_per_weight", "decode_tokens_per_s", "peak_bytes", "error")
    assert {name: getattr(empty, name) for name in figures} == dict.fromkeys(figures)


def test_the_environment_is_plain_data() -> None:
    found = json.loads(json.dumps(describe_environment()))
    assert found["libraries"]["torch"]
    assert found["cpu"]["model"]
    assert found["threads"] == 1
