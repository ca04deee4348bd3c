"""Widths by a budget: the knapsack, what is measured, and whole quantizations."""

from __future__ import annotations

import copy
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zoo
from tests.quantize.models import MOE, ids, same_bits, small
from zoo.components.spec import SpecError
from zoo.model import Model
from zoo.quantize import quantize
from zoo.quantize.budget import allocate, knapsack
from zoo.quantize.methods.rtn import RTN

SETTINGS: dict[str, Any] = {"group_size": 32, "calibration": ids(), "progress": False}


def lively() -> Model:
    """A model whose predictions are far from even, so that they show what is rounded."""
    model = small(bias=True)
    for parameter in model.parameters():
        parameter.data.mul_(10 if parameter.dim() > 1 else 1)
    return model


@pytest.mark.parametrize("seed", range(6))
def test_the_knapsack_is_solved_exactly(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    sizes = [{c: c * float(n) for c in (2, 3, 4)} for n in torch.randint(1, 9, (6,), generator=draw)]
    losses = [dict(zip((2, 3, 4), torch.rand(3, generator=draw, dtype=torch.float64).tolist(), strict=True)) for _ in sizes]
    capacity = 3.1 * sum(size[2] / 2 for size in sizes)
    found = knapsack(sizes, losses, capacity)
    fitting = [p for p in product((2, 3, 4), repeat=6) if sum(s[c] for s, c in zip(sizes, p, strict=True)) <= capacity]
    best = min(fitting, key=lambda p: sum(loss[c] for loss, c in zip(losses, p, strict=True)))
    assert tuple(found) == best


def test_a_knapsack_with_nothing_to_spare() -> None:
    sizes, losses = [{2: 20.0, 4: 40.0}, {2: 10.0, 4: 20.0}], [{2: 1.0, 4: 0.0}, {2: 1.0, 4: 0.0}]
    assert knapsack(sizes, losses, 30) == [2, 2]
    assert knapsack(sizes, losses, 60) == [4, 4]
    assert knapsack(sizes, losses, 1000) == [4, 4]
    with pytest.raises(ValueError, match=r"take 1\.200 times as many"):
        knapsack(sizes, losses, 25)


@pytest.mark.parametrize("bits", [3.0, 3.75, 4.5, 6.25, 20.0])
def test_the_budget_is_kept_and_used(bits: float) -> None:
    report = quantize(small(), "rtn", bits=bits, **SETTINGS)
    budget = report.budget
    assert budget is not None
    assert budget.bits == pytest.approx(report.totals["bits_per_weight"])
    assert budget.bits <= bits
    if bits < 8.5:
        assert budget.bits > bits - 0.45  # the smallest unit is a ninth of the weights
    else:
        assert {u.chosen for u in budget.units} == {8}


def test_losses_are_divergences_of_the_model_with_one_unit_rounded() -> None:
    model = lively()
    budget = allocate(model, "rtn", 4.0, ids(), group_size=32)
    assert same_bits(model, lively())
    assert [u.patterns for u in budget.units[:4]] == [
        tuple(f"layers.0.mixer.projection.{n}" for n in "qkv"),
        ("layers.0.mixer.projection.o",),
        ("layers.0.mlp.gate", "layers.0.mlp.up"),
        ("layers.0.mlp.down",),
    ]
    for unit, bits in ((0, 2), (6, 3)):
        rounded = copy.deepcopy(model)
        for path in budget.units[unit].patterns:
            linear = rounded.get_submodule(path)
            linear.weight.data = RTN(bits=bits, group_size=32).rounded(linear.weight.detach())
        target, found = (F.log_softmax(m(ids()[:4]).double(), -1) for m in (model, rounded))
        expected = (target.exp() * (target - found)).sum(-1).mean().item()
        assert budget.units[unit].loss[bits] == pytest.approx(expected, rel=1e-4)
    assert all(u.loss[2] > u.loss[4] > 10 * u.loss[8] > 0 for u in budget.units)


def test_the_rules_of_the_report_give_the_same_model() -> None:
    model = small()
    report = quantize(model, "gptq", bits=3.9, **SETTINGS)
    assert report.budget is not None
    assert report.budget.rules
    data = json.loads(report.to_json())["budget"]
    again = small()
    quantize(again, "gptq", bits=data["base"], rules=data["rules"], **SETTINGS)
    assert same_bits(model, again)
    assert again.spec == model.spec
    assert report.budget.table().row_count == len(data["units"]) == 8


def test_what_a_rule_fixes_stays() -> None:
    rules = ["layers.0.mlp.down={bits: 8}", "layers.1.*.o=keep"]
    report = quantize(small(), "rtn", bits=4.0, rules=rules, **SETTINGS)
    bits = {row.module: row.settings["bits"] for row in report.rows}
    assert bits["layers.0.mlp.down"] == 8
    assert "layers.1.mixer.projection.o" not in bits
    assert report.totals["bits_per_weight"] <= 4.0


def test_experts_share_a_width() -> None:
    report = quantize(small(MOE), "rtn", bits=4.0, choices=(2, 4, 8), **SETTINGS)
    widths: dict[str, set[int]] = {}
    for row in report.rows:
        if "experts" in row.module:
            layer, _, name = row.module.split(".experts.")[0], None, row.module.rsplit(".", 1)[1]
            widths.setdefault(f"{layer} {'down' if name == 'down' else 'gate and up'}", set()).add(row.settings["bits"])
    assert len(widths) == 4
    assert all(len(found) == 1 for found in widths.values())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"bits": 2.0}, ValueError, "budget of bits is too small"),
        ({"bits": 4.5, "choices": ()}, ValueError, "choices is empty"),
        ({"bits": 4.5, "choices": (4, 5)}, SpecError, "bits"),
        ({"choices": (2, 4)}, ValueError, "needs bits, the mean"),
        ({"method": "nf4", "bits": 4.5, "group_size": None}, SpecError, "group_size"),
    ],
)
def test_mistakes_are_raised_before_work(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    model = small()
    with pytest.raises(error, match=message):
        quantize(model, settings.pop("method", "rtn"), **(SETTINGS | settings))
    assert same_bits(model, small())


def test_a_method_of_one_width_is_refused() -> None:
    with pytest.raises(ValueError, match="nf4 has one width only"):
        quantize(small(), "nf4", bits=4.5, calibration=ids(), progress=False)


@pytest.mark.slow
def test_measured_widths_beat_one_width_and_the_opposite_order(shared_data: Path) -> None:
    """By the divergence from the original on other text, at the bits that a uniform width of 3 takes."""
    path, down = shared_data / "weights/stories260K", ["*.mlp.down={group_size: null}"]
    settings: dict[str, Any] = {"group_size": 32, "samples": 16, "length": 256, "progress": False}
    before, model, uniform, other = (zoo.load(path, dtype="float32") for _ in range(4))
    allowed = quantize(uniform, "gptq", bits=3, rules=down, **settings).totals["bits_per_weight"]
    report = quantize(model, "gptq", bits=allowed, rules=down, **settings)
    assert report.budget is not None
    units, capacity = report.budget.units, allowed * sum(u.weights for u in report.budget.units)
    sizes = [{c: u.bits[c] * u.weights for c in (2, 3, 4)} for u in units]
    worst = knapsack(sizes, [{c: -u.loss[c] for c in (2, 3, 4)} for u in units], capacity - min(min(s.values()) for s in sizes))
    opposite = [f"{pattern}={{bits: {c}}}" for u, c in zip(units, worst, strict=True) for pattern in u.patterns]
    quantize(other, "gptq", bits=3, rules=[*opposite, *down], **settings)
    lost = [divergence(before, found) for found in (model, uniform, other)]
    assert lost[0] < lost[1] < lost[2]


@torch.no_grad()
def divergence(a: Model, b: Model, windows: int = 12) -> float:
    """Mean Kullback-Leibler divergence of b's predictions from those of a on the test text."""
    tokens = torch.tensor(a.tokenizer.encode(zoo.corpus.text("test"), add_special_tokens=False, verbose=False))
    wanted, given = (F.log_softmax(model(tokens[: windows * 256].view(windows, 256)).double(), -1) for model in (a, b))
    return float((wanted.exp() * (wanted - given)).sum(-1).mean())
