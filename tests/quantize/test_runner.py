"""Quantizing whole models: what is replaced, reported, resumed and refused."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from tests.quantize.models import MOE, ids, same_bits, small
from tests.zoo.oracle import llama_checkpoint
from zoo.components.linear.packed_int import PackedLinear
from zoo.components.spec import SpecError
from zoo.model import Model
from zoo.quantize import Report, quantize, runner
from zoo.quantize.methods.rtn import RTN

GPTQ: dict[str, Any] = {"method": "gptq", "group_size": 32, "calibration": ids(), "progress": False}
RULES = ["layers.0.*.v={bits: 8}", "*.mlp.down={symmetric: false}", "layers.1.*.o=keep"]


def run(model: Model, **settings: Any) -> tuple[Model, Report]:
    return model, quantize(model, **(GPTQ | settings))


@pytest.mark.parametrize(
    "settings", [{}, {"true_sequential": True}, {"order": "activation", "scale_search": "mse"}, {"method": "rtn"}], ids=str
)
def test_the_model_is_what_its_spec_says(settings: dict[str, Any]) -> None:
    before = small(bias=True)
    model, report = run(copy.deepcopy(before), rules=RULES, **settings)
    again = model.spec.build()
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in again.named_modules()}
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in again.state_dict().items()}
    again.load_state_dict(model.state_dict())
    again.tie()
    x = ids(2, 20)
    assert torch.equal(model(x), again(x))
    assert not torch.equal(model(x), before(x))
    packed = {n for n, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert packed == {r.module for r in report.rows}
    assert set(report.kept) == {"layers.1.mixer.projection.o", "head.out"}
    assert torch.equal(model.layers[0].mixer.projection.q.bias, before.layers[0].mixer.projection.q.bias)


def test_eight_bits_change_little_and_rows_say_how_much() -> None:
    before = small()
    model, report = run(copy.deepcopy(before), bits=8, group_size=None)
    x = ids(2, 30, seed=3)
    assert (model(x) - before(x)).abs().max() < 0.02 * before(x).abs().max()
    row = report.rows[0]
    assert row.module == "layers.0.mixer.projection.q"
    assert row.settings == {
        "bits": 8,
        "group_size": None,
        "symmetric": True,
        "scale_search": "minmax",
        "damping": 0.01,
        "order": "natural",
        "static_groups": False,
    }
    assert row.tokens == 6 * 24
    assert row.facts == {"damping": 0.01}
    assert row.bits_per_weight == 8 + 32 / 64
    assert 0 < row.output_error < row.weight_error < 0.01
    assert report.totals["bits_per_weight"] == pytest.approx(
        sum(r.bits_per_weight * r.weights for r in report.rows) / report.totals["weights"]
    )
    data = json.loads(report.to_json())
    assert data["settings"]["samples"] == 6
    assert len(data["rows"]) == 14
    assert data["totals"]["fallbacks"] == 0
    assert report.table().row_count == 14


def test_reported_errors_are_the_outputs_errors() -> None:
    """The inputs of the first layer do not change, so its rows can be checked from outside."""
    before = small()
    model, report = run(copy.deepcopy(before), bits=3)
    seen: list[torch.Tensor] = []
    handle = before.layers[0].mixer.projection.q.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    before(ids())
    handle.remove()
    old, new = (m.layers[0].mixer.projection.q.dense_weight(torch.float32).detach() for m in (before, model))
    x = seen[0].detach().flatten(0, 1)
    assert report.rows[0].output_error == pytest.approx(float((x @ (old - new).T).norm() / (x @ old.T).norm()), rel=1e-3)


def test_methods_without_data_need_none() -> None:
    model = small()
    report = quantize(model, "rtn", group_size=32, progress=False)
    assert all(r.tokens is None and r.output_error is None for r in report.rows)
    assert report.totals["output_error"] is None
    with_data, report = run(small(), method="rtn")
    assert same_bits(model, with_data)
    assert all(r.output_error is not None for r in report.rows)


def test_a_spec_is_a_method_too() -> None:
    by_name, by_spec = small(), small()
    quantize(by_name, "rtn", bits=3, group_size=32, progress=False)
    quantize(by_spec, RTN(bits=3, group_size=32), progress=False)
    assert same_bits(by_name, by_spec)


def test_later_layers_are_fitted_to_quantized_inputs() -> None:
    """The last layer's Hessian is that of what the quantized layers before it put out."""
    model, report = run(small(layers=3), bits=2)
    seen: list[torch.Tensor] = []
    fresh = small(layers=3)
    for i in (0, 1):
        fresh.layers[i] = model.layers[i]
    fresh.layers[2].mixer.projection.q.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    fresh(ids())
    x = seen[0].detach().flatten(0, 1)
    old, new = (m.layers[2].mixer.projection.q.dense_weight(torch.float32).detach() for m in (fresh, model))
    error = next(r.output_error for r in report.rows if r.module == "layers.2.mixer.projection.q")
    assert error == pytest.approx(float((x @ (old - new).T).norm() / (x @ old.T).norm()), rel=1e-3)


def test_true_sequential_sees_quantized_inputs_within_a_layer() -> None:
    plain, _ = run(small(), bits=2)
    sequential, report = run(small(), bits=2, true_sequential=True)
    ours, theirs = (m.layers[0].state_dict() for m in (plain, sequential))
    changed = {n for n in ours if not torch.equal(ours[n], theirs[n])}
    assert "mixer.projection.q.packed" not in changed
    assert "mlp.down.packed" in changed
    assert [r.module.rpartition(".")[2] for r in report.rows[:7]] == ["q", "k", "v", "o", "gate", "up", "down"]


def test_heads_that_are_not_tied() -> None:
    model, report = run(small(tied=False), rules=["head.*={bits: 8}"])
    assert report.rows[-1].module == "head.out"
    assert report.rows[-1].tokens == 6 * 24
    assert isinstance(model.head.out, PackedLinear)


def test_only_the_layers_needed_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(layers=3)
    calls: list[int] = []
    for i, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    run(model, rules=["layers.1.*=keep", "layers.2.*=keep"])
    assert set(calls) == {0}


def test_experts_that_saw_no_token_fall_back() -> None:
    model, report = run(small(MOE), calibration=ids(1, 2))
    rows = [r for r in report.rows if "experts" in r.module]
    assert len(rows) == 2 * 8 * 3
    unseen = [r for r in rows if r.tokens is None]
    assert unseen
    assert all(r.facts == {"fallback": "rtn: no tokens"} for r in unseen)
    assert all("fallback" not in r.facts for r in rows if r.tokens)
    assert report.totals["fallbacks"] == len(unseen)
    assert model(ids(2, 20)).isfinite().all()


@pytest.mark.parametrize("sequential", [False, True])
def test_experts_are_quantized(sequential: bool) -> None:
    model, report = run(small(MOE), true_sequential=sequential, calibration=ids(8, 60))
    assert sum("experts" in r.module for r in report.rows) == 48
    assert all(m.matmul.name == "torch_int4" for m in model.modules() if isinstance(m, PackedLinear))


def test_a_damaged_weight_is_named() -> None:
    model = small()
    with torch.no_grad():
        model.layers[1].mlp.up.weight[3, 3] = math.nan
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up: the weight holds NaN or infinity"):
        quantize(model, "rtn", group_size=32, progress=False)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"method": "gptk"}, SpecError, "did you mean 'gptq'"),
        ({"bit": 4}, SpecError, "did you mean 'bits'"),
        ({"bits": 5}, SpecError, "bits"),
        ({"group_size": 64}, ValueError, "96 inputs do not divide into groups of 64"),
        ({"rules": ["*.mpl.*=keep"]}, ValueError, "matches no module"),
        ({"samples": 3}, ValueError, "used as they are"),
        ({"calibration": None}, ValueError, "no tokenizer"),
        ({"method": "rtn", "calibration": None, "true_sequential": True}, ValueError, "true_sequential changes nothing"),
    ],
    ids=str,
)
def test_mistakes_are_raised_before_work(settings: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    model = small()
    with pytest.raises(error, match=message):
        run(model, work_dir=tmp_path / "work", **settings)
    assert same_bits(model, small())
    assert not (tmp_path / "work").exists()


# ---- resume ------------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def killed_at(monkeypatch: pytest.MonkeyPatch, module: str, work_dir: Path, **settings: Any) -> None:
    """Run until the given module's turn, then die as by a signal."""
    real = runner.quantize_module

    def dying(model: Model, path: str, *rest: Any) -> Any:
        if path == module:
            raise Killed
        return real(model, path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "quantize_module", dying)
        with pytest.raises(Killed):
            run(small(layers=3), work_dir=work_dir, **settings)


@pytest.mark.parametrize(
    "settings", [{"bits": 3}, {"bits": 3, "rules": RULES, "true_sequential": True}, {"method": "rtn", "calibration": None}], ids=str
)
@pytest.mark.parametrize("module", ["layers.0.mlp.up", "layers.1.mixer.projection.q", "layers.2.mlp.down"])
def test_a_killed_run_continues_to_the_same_bits(
    settings: dict[str, Any], module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, expected = run(small(layers=3), **settings)
    killed_at(monkeypatch, module, tmp_path, **settings)
    done = int(module.split(".")[1])
    assert len(list(tmp_path.glob("layers.*.safetensors"))) == done
    turns: list[str] = []
    real = runner.quantize_module
    monkeypatch.setattr(runner, "quantize_module", lambda model, path, *rest: turns.append(path) or real(model, path, *rest))
    resumed, report = run(small(layers=3), work_dir=tmp_path, **settings)
    assert same_bits(whole, resumed)
    assert resumed.spec == whole.spec
    assert all(int(path.split(".")[1]) >= done for path in turns)
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in r.to_dict()["rows"]] for r in (expected, report)]
    assert rows[0] == rows[1]


def test_a_crash_between_a_stage_and_its_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run(small(layers=3), bits=3)
    killed_at(monkeypatch, "layers.1.mlp.down", tmp_path, bits=3)
    hidden = (tmp_path / "hidden.safetensors").read_bytes()
    killed_at(monkeypatch, "layers.2.mlp.down", tmp_path, bits=3)
    (tmp_path / "hidden.safetensors").write_bytes(hidden)
    (tmp_path / "hidden.tmp").write_bytes(b"half a file")
    assert same_bits(whole, run(small(layers=3), bits=3, work_dir=tmp_path)[0])


def test_a_finished_run_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run(small(), work_dir=tmp_path)
    monkeypatch.setattr(runner, "quantize_module", None)
    assert same_bits(whole, run(small(), work_dir=tmp_path)[0])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"bits": 3}, "method was"),
        ({"calibration": ids(6, 24, seed=9)}, "tokens was"),
        ({"rules": ["*.mlp.down=keep"]}, "rules was"),
        ({"true_sequential": True}, "true_sequential was False, is True"),
        ({"seed": 1}, "weights was"),
    ],
    ids=str,
)
def test_another_run_is_refused_naming_what_differs(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    run(small(), work_dir=tmp_path)
    model = small(seed=settings.pop("seed", 0))
    with pytest.raises(ValueError, match=f"belongs to another quantization: .*{named}"):
        run(model, work_dir=tmp_path, **settings)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        run(small(), work_dir=tmp_path)


# ---- checkpoints -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    llama_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16, num_hidden_layers=3, max_position_embeddings=64)
    return tmp_path / "model"


def test_lazily_loaded_layers_give_the_same_bits(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"rules": ["model.layers.*.mlp.down_proj={bits: 8}"]}
    eager, _ = run(zoo.load(checkpoint), **settings)
    lazy, _ = run(zoo.load(checkpoint, lazy=True), **settings)
    assert same_bits(eager, lazy)
    data_free = zoo.load(checkpoint, lazy=True)
    quantize(data_free, "rtn", group_size=32, work_dir=tmp_path / "work", progress=False)
    assert not any(t.is_meta for t in data_free.state_dict().values())
    resumed = zoo.load(checkpoint, lazy=True)
    quantize(resumed, "rtn", group_size=32, work_dir=tmp_path / "work", progress=False)
    assert same_bits(data_free, resumed)


def test_one_unquantized_layer_is_held_at_a_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.load(checkpoint, lazy=True)
    held: list[int] = []
    real = runner.quantize_module

    def counting(model: Model, *rest: Any) -> Any:
        held.append(sum(any(isinstance(m, nn.Linear) and not m.weight.is_meta for m in layer.modules()) for layer in model.layers))
        return real(model, *rest)

    monkeypatch.setattr(runner, "quantize_module", counting)
    run(model)
    assert set(held) == {1}


def test_progress_is_one_line_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    run(small(), progress=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("vLLM and SGLang", "  on "))]
    assert len(lines) == 3
    assert re.fullmatch(r"quantizing takes about \d+ s and [\d.]+ MiB of memory \(hessians [\d.]+ MiB, factor .*\)", lines[0])
    assert lines[1].startswith("1/2 layers.0: 7 modules, output error at most 0.")
    run(small(), progress=False)
    assert capsys.readouterr().err == ""
