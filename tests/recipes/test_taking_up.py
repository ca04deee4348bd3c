"""What a run takes up of an earlier one: only what was made for the very same variant."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import zoo
import zoo.recipes.runner as runner
import zoo.recipes.worker as worker
from tests.eval.made import make_tiny
from zoo.eval.results import Results, Variant, load_results, save_results
from zoo.recipes.recipe import Recipe, read_recipe

MEASURE: dict[str, Any] = {"perplexity": {"context": 32, "limit": 2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder)
    return folder


@dataclass
class Workers:
    """Stand-ins for the processes of a run: the folder holds its bits, the figure is the folder's bits, and any step may be killed."""

    killed: str | None = None
    steps: list[str] = field(default_factory=list)

    def __call__(self, order: runner.Order) -> int:
        self.steps.append(f"{order.step} {order.variant.label}")
        if order.step == self.killed and order.index:
            raise KeyboardInterrupt
        if order.step == "make":
            self.make(order)
        else:
            bits = (order.folder / "bits").read_text() if order.needed else "32"
            save_results(Results(environment={}, variants=[Variant(name=order.variant.label, perplexity=float(bits))]), order.result)
        return 0

    def make(self, order: runner.Order) -> None:
        """Another folder in the place of the old one, as ``zoo.save`` does it."""
        runner.shutil.rmtree(order.folder, ignore_errors=True)
        order.folder.mkdir(parents=True)
        (order.folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (order.folder / "bits").write_text(str(getattr(order.variant.quantizer, "bits", 32)))
        order.leave({"spec": None})


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    found = Workers()
    monkeypatch.setattr(runner, "_work", found)
    monkeypatch.setattr(runner, "describe_environment", lambda: dict.fromkeys(("zoo", "revision", "libraries", "threads")))
    monkeypatch.setattr("zoo.eval.report.write_report", lambda results, out: [])
    return found


@dataclass(frozen=True)
class Bench:
    """Runs a recipe of a baseline and ``a`` of so many bits, and says which bits the row and the folder of ``a`` are of."""

    model: Path
    out: Path
    save: bool

    def recipe(self, bits: int) -> Recipe:
        path = self.out.parent / "recipe.yaml"
        variants = [{"label": "baseline"}, {"label": "a", "quantizer": {"name": "rtn", "bits": bits, "group_size": 16}}]
        path.write_text(yaml.safe_dump({"model": str(self.model), "variants": variants, "measure": MEASURE | {"save": self.save}}))
        return read_recipe(path)

    def run(self, bits: int, **options: Any) -> tuple[float | None, str | None]:
        row = runner.run(self.recipe(bits), self.out, console=Console(quiet=True), **options).variants[1]
        kept = self.out / "models/a/bits"
        return row.perplexity, kept.read_text() if kept.exists() else None


@pytest.fixture(params=[False, True], ids=["not saved", "saved"])
def bench(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Bench:
    return Bench(model, tmp_path / "out", request.param)


def test_a_folder_made_for_another_variant_is_not_taken_up(bench: Bench, workers: Workers) -> None:
    """A is killed between its steps, B of the same label takes its folder, and A comes back."""
    workers.killed = "measure"
    with pytest.raises(KeyboardInterrupt):
        bench.run(8)
    workers.killed = None
    assert bench.run(2) == (2, "2" if bench.save else None)
    assert bench.run(8) == (8, "8" if bench.save else None)


def test_a_killed_variant_is_made_once(bench: Bench, workers: Workers) -> None:
    workers.killed = "measure"
    with pytest.raises(KeyboardInterrupt):
        bench.run(8)
    workers.killed = None
    bench.run(8)
    assert workers.steps.count("make a") == 1
    assert workers.steps.count("measure a") == 2


def test_the_saved_folder_is_the_one_of_the_row(model: Path, tmp_path: Path, workers: Workers) -> None:
    """A finished row is kept only with the folder that belongs to it; B took it over."""
    bench = Bench(model, tmp_path / "out", save=True)
    for bits in (8, 2, 8):
        assert bench.run(bits) == (bits, str(bits))
    workers.steps.clear()
    assert bench.run(8) == (8, "8")
    assert not workers.steps


def test_another_source_is_another_variant(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, keys = Bench(model, tmp_path / "out", save=False).recipe(8), set()
    for revision in ("0a1b", "0a1b-dirty-1", "0a1b-dirty-2"):
        monkeypatch.setattr("zoo.eval.environment.revision", lambda revision=revision: revision)
        keys.add(runner.key(recipe, 1))
    assert len(keys) == 3


def test_fresh_makes_everything_anew(bench: Bench, workers: Workers) -> None:
    workers.killed = "measure"
    with pytest.raises(KeyboardInterrupt):
        bench.run(8)
    workers.killed = None
    (bench.out / "models/a/bits").write_text("3")  # the folder is not what its record says
    label = f"a-{runner.key(bench.recipe(8), 1)}"
    (bench.out / "work" / label).mkdir(parents=True)
    assert bench.run(8, fresh=True) == (8, "8" if bench.save else None)
    assert not (bench.out / "work" / label).exists()


def test_a_damaged_record_counts_for_none(bench: Bench, workers: Workers) -> None:
    order = runner.Order(bench.recipe(8), 1, bench.out, bench.out / "variants/a-0.json", "measure")
    workers.make(order)
    assert order.made() is not None
    order.record.write_bytes(order.record.read_bytes()[:-5])
    assert order.made() is None


def order_of(model: Path, out: Path, measure: dict[str, Any] = MEASURE, **variant: Any) -> runner.Order:
    path = out / "recipe.yaml"
    variants = [{"label": "baseline"}, {"label": "a", **variant}]
    data = {"model": str(model), "dtype": "float32", "calibration": {"samples": 3, "length": 16}, "variants": variants, "measure": measure}
    path.write_text(yaml.safe_dump(data))
    return runner.Order(read_recipe(path), 1, out, out / "variants/a-0.json", "make")


def test_the_record_goes_with_the_folder_and_counts_for_nothing_in_its_size(model: Path, tmp_path: Path) -> None:
    rtn = {"name": "rtn", "bits": 4, "group_size": 16}
    order = order_of(model, tmp_path, MEASURE | {"save": True}, quantizer=rtn)
    worker.make(order)
    weighed = sum(p.stat().st_size for p in order.folder.rglob("*") if p.is_file() and p != order.record)
    assert worker.measure(order).disk_bytes == weighed
    zoo.save(zoo.load(model), order.folder, overwrite=True)
    with pytest.raises(RuntimeError, match="models/a is not this variant's any more; is another run writing to"):
        worker.measure(order)


@pytest.mark.parametrize(("name", "rules", "tokens"), [
    ("rtn", [], None),
    ("rtn", ["*.mlp.down={name: gptq}"], 48),
    ("gptq", [], 48),
    ("gptq", ["*.mlp.*={name: rtn}"], 48),
    ("gptq", ["layers.*={name: rtn}"], None),
    ("rtn", ["*.mlp.down={name: gptq}", "*.mlp.down=keep"], None),
])  # fmt: skip
def test_the_recipes_calibration_is_what_any_quantizer_sees(model: Path, tmp_path: Path, name: str, rules: list[str],
                                                             tokens: int | None) -> None:  # fmt: skip
    """3 windows of 16 tokens wherever a module's own quantizer needs data, none where no module's does."""
    order = order_of(model, tmp_path, quantizer={"name": name, "bits": 4, "group_size": 16}, rules=rules)
    worker.make(order)
    made = order.made()
    assert made is not None
    assert {row["tokens"] for row in made["modules"]} == {tokens}


def test_a_failure_is_told_and_keeps_the_folder(bench: Bench, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant whose measuring failed is measured again from its folder."""

    def failing(order: runner.Order) -> int:
        if order.step == "make" or not order.index:
            return workers(order)
        save_results(Results(environment={}, variants=[Variant(name="a", error="no memory")]), order.result)
        return 1

    with monkeypatch.context() as context:
        context.setattr(runner, "_work", failing)
        runner.run(bench.recipe(8), bench.out, console=Console(quiet=True))
    assert load_results(bench.out / "results.json").variants[1].error == "no memory"
    assert bench.run(8) == (8, "8" if bench.save else None)
    assert workers.steps.count("make a") == 1
