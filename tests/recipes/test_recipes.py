from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import zoo.recipes.runner as runner
import zoo.recipes.worker as worker
from tests.eval.made import make_tiny
from zoo.components.spec import SpecError
from zoo.eval.changes import perplexity_change
from zoo.eval.environment import revision
from zoo.eval.results import Results, Variant, load_results, save_results
from zoo.eval.summary import summarize
from zoo.recipes.recipe import Recipe, merge, names, read_recipe

BASE: dict[str, Any] = {
    "model": "MODEL",
    "dtype": "float32",
    "calibration": {"samples": 4, "length": 32},
    "measure": {"perplexity": {"context": 32, "limit": 4}, "speed": {"prompt_tokens": 8, "new_tokens": 4, "repeats": 1}},
    "variants": [
        {"label": "baseline"},
        {"label": "rtn", "quantizer": {"name": "rtn", "bits": 4, "group_size": 16}},
        {
            "label": "gptq",
            "quantizer": {"name": "gptq", "bits": 4, "group_size": 16},
            "transforms": ["smoothquant"],
            "rules": ["*.mlp.down=keep"],
        },
        {"label": "window", "override": ["layers.*.mixer.pattern={name: window, size: 4}"]},
    ],
}


def write(folder: Path, name: str = "recipe.yaml", **changes: Any) -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(BASE | changes))
    return path


@pytest.fixture
def quiet() -> Console:
    return Console(quiet=True)


@pytest.mark.parametrize("name", names())
def test_built_in_recipes_are_valid(name: str) -> None:
    assert read_recipe(name).variants[0].label == "baseline"
    assert read_recipe(f"recipes/{name}.yaml") == read_recipe(name)


def test_mistakes_come_at_once_with_their_place(tmp_path: Path) -> None:
    variants = [{"label": "a", "quantizer": {"name": "gptk"}}, {"label": "b", "quantizer": {"name": "rtn", "bitz": 4}}, {"lable": "c"}]
    with pytest.raises(SpecError) as e:
        read_recipe(write(tmp_path, variants=variants, dtype="float12"))
    for line in (
        "variants.0.quantizer: no quantizer named 'gptk'; did you mean 'gptq'?",
        "variants.1.quantizer.bitz",
        "did you mean 'label'?",
        "dtype",
    ):
        assert line in str(e.value)


@pytest.mark.parametrize(("changes", "message"), [
    ({"variants": [{"label": "a"}, {"label": "a"}]}, "two variants are called 'a'"),
    ({"variants": []}, "at least one variant"),
    ({"variants": [{"label": "../a"}]}, r"variants\.0\.label: '\.\./a' names files"),
    ({"variants": [{"label": ".."}]}, "names files"),
    ({"variants": [{"label": "int4"}, {"label": "INT4"}]}, r"variants\.1\.label: 'INT4' and 'int4' name the same file where case"),
    ({"variants": [{"label": "caf\u00e9"}, {"label": "cafe\u0301"}]}, "name the same file where case, accents' spelling"),
    ({"variants": [{"label": "a"}, {"label": "b"}, {"label": "a."}]}, r"variants\.2\.label: 'a\.' and 'a' name the same file"),
    ({"variants": [{"label": "x" * 161}]}, r"variants\.0\.label: 'xxx.*\.\.\.' names files: it has 161 bytes, at most 160"),
    ({"variants": [{"label": "\u732b" * 60}]}, "it has 180 bytes, at most 160"),
    ({"measure": {}}, "nothing to measure"),
    ({"variants": [{"label": "a", "rules": ["x=keep"]}]}, "rules need a quantizer"),
    ({"variants": [{"label": "a", "transforms": ["awq"]}]}, "transforms need a quantizer"),
    ({"variants": [{"label": "a", "quantizer": "rtn", "transforms": [{"name": "smoothquant", "alpha": 3}]}]},
     "variants.0.transforms.0.alpha: must lie in 0..1"),
    ({"variants": [{"label": "a", "convert": ["mha", "mqq"]}]}, r"variants\.0\.convert\.1: nothing converts to 'mqq'; did you mean 'mqa'"),
    ({"variants": [{"label": "a", "convert": [{"name": "mla", "rnk": 3}]}]}, r"convert\.0: rnk: .*did you mean 'rank'"),
    ({"measure": {"perplexity": {"context": []}}}, r"measure\.perplexity\.context: several contexts differ, and there is at least one"),
    ({"measure": {"perplexity": {"context": [32, 32]}}}, "several contexts differ"),
    ({"measure": {"perplexity": {"context": [64, 32], "prompt": 32}}}, r"measure\.perplexity\.prompt: must leave tokens of the 32"),
])  # fmt: skip
def test_mistakes_that_types_do_not_catch(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_recipe(write(tmp_path, **changes))


def test_imports_merge_below_and_may_not_loop(tmp_path: Path) -> None:
    write(tmp_path, "below.yaml", calibration={"samples": 9, "length": 7})
    above = tmp_path / "above.yaml"
    above.write_text(yaml.safe_dump({"imports": ["below.yaml"], "calibration": {"samples": 3}, "variants": [{"label": "more"}]}))
    recipe = read_recipe(above, "calibration.seed=5")
    assert (recipe.calibration.samples, recipe.calibration.length, recipe.calibration.seed) == (3, 7, 5)
    assert [v.label for v in recipe.variants] == ["baseline", "rtn", "gptq", "window", "more"]
    (tmp_path / "loop.yaml").write_text("imports: [loop.yaml]")
    with pytest.raises(ValueError, match="imports itself"):
        read_recipe(tmp_path / "loop.yaml")


def test_unknown_recipe_gives_the_nearest() -> None:
    with pytest.raises(ValueError, match="no such recipe; did you mean 'quickstart'"):
        read_recipe("quickstrat")


def test_merge_replaces_lists_and_appends_variants() -> None:
    assert merge({"a": [1], "b": {"c": 1, "d": 2}, "variants": [1]}, {"a": [2], "b": {"c": 3}, "variants": [2]}) == {
        "a": [2], "b": {"c": 3, "d": 2}, "variants": [1, 2]}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder)
    return folder


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Recipe:
    return read_recipe(write(tmp_path, model=str(model)))


def test_a_key_changes_with_what_matters_only(recipe: Recipe, model: Path, tmp_path: Path) -> None:
    same = read_recipe(write(tmp_path, "other.yaml", model=str(model), about="another text"))
    assert runner.key(recipe, 1) == runner.key(same, 1)
    for edit in ("calibration.seed=1", "measure.perplexity.limit=5", "variants.1.quantizer.bits=3", "dtype=bfloat16"):
        assert runner.key(read_recipe(write(tmp_path, model=str(model)), edit), 1) != runner.key(recipe, 1)
    assert runner.key(read_recipe(write(tmp_path, model=str(model)), "variants.2.quantizer.bits=3"), 1) == runner.key(recipe, 1)


def test_the_longest_label_names_files(recipe: Recipe, tmp_path: Path) -> None:
    long = read_recipe(write(tmp_path, "long.yaml", variants=[{"label": "x" * 160}]))
    order = runner.Order(long, 0, tmp_path, tmp_path / "variants" / f"{long.variants[0].label}-{'0' * 12}.json", "make")
    order.write(order.result.with_suffix(".order.json"))
    order.work.mkdir(parents=True)
    order.folder.mkdir(parents=True)
    order.leave({})
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["models", "variants", "work"]


@pytest.mark.parametrize("name", ["results.json", "report.html", "pareto.png"])
def test_files_of_no_run_are_not_replaced(recipe: Recipe, tmp_path: Path, quiet: Console, monkeypatch: pytest.MonkeyPatch,
                                          name: str) -> None:  # fmt: skip
    monkeypatch.setattr(runner, "_run_one", lambda *_: pytest.fail("a variant was run"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(FileExistsError, match=rf"out holds {re.escape(name)}, but no run of a recipe wrote it"):
        runner.run(recipe, tmp_path / "out", console=quiet)
    assert (tmp_path / "out" / name).read_text() == "mine"
    with pytest.raises(FileExistsError, match="is a file; results need a folder"):
        runner.run(recipe, tmp_path / "out" / name, console=quiet)


def test_a_folder_of_ones_own_among_the_models_is_refused(recipe: Recipe, tmp_path: Path, quiet: Console,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(runner, "_run_one", lambda *_: pytest.fail("a variant was run"))
    for label in ("baseline", "rtn"):
        (tmp_path / "out/models" / label).mkdir(parents=True)
        (tmp_path / "out/models" / label / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"models/rtn is not empty and never replaced.*notes\.txt"):  # the baseline is not written
        runner.run(recipe, tmp_path / "out", console=quiet)


def test_what_a_variant_did_not_write_is_not_deleted(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline is measured where it lies; a folder of its label is nobody's but the user's."""

    def work(order: runner.Order) -> int:
        done = Variant(name=order.variant.label, perplexity=2.0)
        save_results(Results(environment={}, variants=[done]), order.result)
        return 0

    monkeypatch.setattr(runner, "_work", work)
    notes = tmp_path / "out/models/baseline/notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    order = runner.Order(recipe, 0, tmp_path / "out", tmp_path / "out/variants/baseline-0.json", "measure")
    assert runner._run_one(order).error is None
    assert notes.read_text() == "mine"


def test_a_damaged_variant_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "baseline-0.json"
    save_results(Results(environment={}, variants=[Variant(name="baseline", perplexity=2.0)]), path)
    assert runner._finished(path) is not None
    path.write_bytes(path.read_bytes()[:-20])
    assert runner._finished(path) is None


def test_parts_are_swapped_and_read_through_their_caches(model: Path, tmp_path: Path) -> None:
    """Conversions are made, saved and read back; each context has its perplexity and the bytes of its cache."""
    variants = [{"label": "baseline"}, {"label": "kivi", "override": ["cache={name: kivi, bits: 2, group: 4, residual: 8}"]},
                {"label": "mla", "convert": ["mha", {"name": "mla", "rank": 8}]}, {"label": "mha", "convert": ["mha"]},
                {"label": "fp8", "calibrated_cache": "fp8"}]  # fmt: skip
    measure = {"perplexity": {"context": [32, 64], "prompt": 8, "limit": 2}}
    calibration = {"samples": 2, "length": 32}
    recipe = read_recipe(write(tmp_path, model=str(model), variants=variants, measure=measure, calibration=calibration))
    assert len({runner.key(recipe, i) for i in range(5)}) == 5
    done = {}
    for i, variant in enumerate(recipe.variants):
        order = runner.Order(recipe, i, tmp_path, tmp_path / f"{variant.label}.json", "make")
        assert order.needed == bool(variant.convert or variant.calibrated_cache)
        if order.needed:
            worker.make(order)
        done[variant.label] = worker.measure(order)
    base, kivi, mla, mha, fp8 = (done[name] for name in ("baseline", "kivi", "mla", "mha", "fp8"))
    assert base.perplexities.keys() == {"64"}
    assert base.cache_bytes.keys() == {"32", "64"}
    assert mha.perplexity == pytest.approx(base.perplexity, rel=1e-4)
    assert mha.perplexities["64"] == pytest.approx(base.perplexities["64"], rel=1e-4)
    assert mha.cache_bytes_per_token == 2 * (base.cache_bytes_per_token or 0)
    assert fp8.cache_bytes_per_token == (base.cache_bytes_per_token or 0) // 4
    for lossy in (kivi, mla, fp8):
        for kind in ("perplexity", "perplexity at 64"):
            assert abs(perplexity_change(lossy, base, kind).value) > 1e-5
    how = kivi.measured["perplexity at 64"]["protocol"]["reading"]
    assert how == "through the kivi cache: a prompt of 8 tokens, then calls of at most 8 tokens"
    assert [(row["conversion"], row["exact"]) for row in mla.modules] == [("gqa_to_gqa", True), ("gqa_to_latent", False)]
    results = Results(environment={}, variants=list(done.values()))
    titles = [column.title for column in summarize(results).columns]
    assert titles[2:7] == ["Perplexity", "Perplexity at 64", "KV / token", "KV at 32", "KV at 64"]
    save_results(results, tmp_path / "r.json")
    assert load_results(tmp_path / "r.json").variants[1].cache_bytes == kivi.cache_bytes


def test_tasks_that_are_not_there_are_said_before_anything_runs(model: Path, tmp_path: Path, quiet: Console) -> None:
    recipe = read_recipe(write(tmp_path, model=str(model), measure={"tasks": {"names": ["zoo_comon"]}}))
    with pytest.raises(ValueError, match="no task named 'zoo_comon'; the nearest are "):
        runner.run(recipe, tmp_path / "out", console=quiet)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def any_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Git does not tell the revision, so that a source which is edited during a long test changes nothing."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert revision() is None


@pytest.mark.slow
@pytest.mark.usefixtures("any_source")
def test_a_run_writes_everything_and_keeps_what_is_finished(recipe: Recipe, tmp_path: Path, quiet: Console) -> None:
    out = tmp_path / "out"
    results = runner.run(recipe, out, console=quiet)
    assert [v.error for v in results.variants] == [None] * 4
    assert {"results.json", "report.html", "pareto.png"} <= {p.name for p in out.iterdir()}
    stored = json.loads((out / "results.json").read_text())
    for variant in stored["variants"]:
        for field in (
            "name",
            "perplexity",
            "tasks",
            "bytes",
            "bits_per_weight",
            "decode_tokens_per_s",
            "prefill_tokens_per_s",
            "peak_bytes",
            "spec",
        ):
            assert variant[field] is not None, field
    assert stored["variants"][1]["bits_per_weight"] < 6 < 32 == stored["variants"][0]["bits_per_weight"]
    assert len(stored["variants"][1]["modules"]) == 14
    assert len(stored["variants"][2]["modules"]) == 12
    assert stored["variants"][3]["spec_diff"][0] == ["layers.0:2.mixer.pattern", "causal", "window"]
    times = {p: p.stat().st_mtime_ns for p in (out / "variants").iterdir()}
    again = runner.run(recipe, out, console=quiet)
    assert {p: p.stat().st_mtime_ns for p in (out / "variants").iterdir()} == times
    assert [v.perplexity for v in again.variants] == [v.perplexity for v in results.variants]


@pytest.mark.slow
def test_a_failing_variant_does_not_stop_the_others(model: Path, tmp_path: Path, quiet: Console) -> None:
    variants = [
        {"label": "baseline"},
        {"label": "bad", "quantizer": {"name": "rtn", "group_size": 7}},
        {"label": "good", "quantizer": {"name": "rtn", "group_size": 16}},
    ]
    results = runner.run(read_recipe(write(tmp_path, model=str(model), variants=variants)), tmp_path / "out", console=quiet)
    assert results.variants[0].error is results.variants[2].error is None
    assert "layers.0.mixer.projection.q" in str(results.variants[1].error)
    assert load_results(tmp_path / "out/results.json").variants[1].error


@pytest.mark.slow
@pytest.mark.usefixtures("any_source")
def test_a_killed_run_keeps_finished_variants(model: Path, tmp_path: Path) -> None:
    path, out = write(tmp_path, model=str(model)), tmp_path / "out"
    command = [sys.executable, "-c", "from zoo.cli import main; main()", "run", str(path), "--out", str(out)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while not any(p.name.count(".") == 1 for p in (out / "variants").glob("baseline-*.json")):  # the result, not an order
        assert first.poll() is None
        time.sleep(0.2)
    time.sleep(0.3)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "baseline: kept from an earlier run" in second.stdout
    assert len(load_results(out / "results.json").variants) == 4
