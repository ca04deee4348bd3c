"""Tuning of signs and codebooks: gradients, what is kept, and whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.quantize.models import ids, small
from zoo.quantize import quantize, verify
from zoo.quantize.contracts import Block, Quantizer
from zoo.quantize.methods._tuning import Tuned
from zoo.quantize.methods.aqlm import AQLM
from zoo.quantize.methods.aqlm_tuned import TunedAQLM
from zoo.quantize.methods.quip_sharp import QuIPSharp
from zoo.quantize.methods.quip_sharp_tuned import TunedQuIPSharp
from zoo.quantize.rules import quantizer
from zoo.quantize.stats.hessian import Hessian

PLAIN: dict[str, Any] = {"bits": 4, "rounds": 1, "steps": 2}
PAIRS = [(QuIPSharp(sweeps=0), TunedQuIPSharp(sweeps=0)), (AQLM(**PLAIN), TunedAQLM(**PLAIN))]


def block(method: Quantizer, samples: int = 12) -> Block:
    """A layer of two modules with a nonlinearity between them, on correlated inputs."""
    generator = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(32, 24, generator=generator) / 5, "b": torch.randn(24, 32, generator=generator) / 6}
    inputs = torch.randn(samples, 6, 24, generator=generator) @ (torch.eye(24) + 0.3 * torch.randn(24, 24, generator=generator))

    def run(x: Tensor, changed: Any) -> Tensor:
        return torch.relu(x @ changed["a"].t()) @ changed["b"].t()

    hessians = {name: Hessian(w.shape[1]) for name, w in weights.items()}
    hessians["a"].update(inputs)
    hessians["b"].update(torch.relu(inputs @ weights["a"].t()))
    return Block(weights, dict.fromkeys(weights, method), inputs, run(inputs, weights), run, hessians)


def layer_error(method: Quantizer, given: Block, results: Any) -> float:
    weights = {}
    for name, weight in given.weights.items():
        module: Any = method.storage.build(weight.shape[1], weight.shape[0], False)
        module.hold(results[name].tensors)
        weights[name] = module.dense_weight()
    return float((given.run(given.inputs, weights) - given.targets).square().sum() / given.targets.square().sum())


@pytest.mark.parametrize(("plain", "tuned"), PAIRS, ids=["quip_sharp", "aqlm"])
def test_tuning_lowers_the_layers_error(plain: Quantizer, tuned: Tuned) -> None:
    longer = quantizer(tuned, {"epochs": 20, "learning_rate": 3e-3})
    assert isinstance(longer, Tuned)
    given = block(longer)
    before = layer_error(plain, given, {n: plain.quantize(w, given.hessians[n]) for n, w in given.weights.items()})
    with torch.no_grad():  # as the runner is
        results = longer.quantize_block(given)
    after = layer_error(longer, given, results)
    assert after < 0.9 * before
    assert results["a"].facts["layer_error"] < results["a"].facts["layer_error_before"]


@pytest.mark.parametrize(("plain", "tuned"), PAIRS, ids=["quip_sharp", "aqlm"])
def test_without_a_gain_nothing_changes(plain: Quantizer, tuned: Tuned) -> None:
    wild = quantizer(tuned, {"learning_rate": 10.0, "epochs": 2})
    assert isinstance(wild, Tuned)
    given = block(wild)
    results = wild.quantize_block(given)
    for name, weight in given.weights.items():
        expected = plain.quantize(weight, given.hessians[name]).tensors
        assert all(torch.equal(results[name].tensors[n], expected[n]) for n in expected)


@pytest.mark.parametrize(("plain", "tuned"), PAIRS, ids=["quip_sharp", "aqlm"])
def test_a_tunables_weight_is_that_of_its_storage(plain: Quantizer, tuned: Tuned) -> None:
    given = block(tuned)
    result = tuned.quantize(given.weights["a"], given.hessians["a"])
    module: Any = tuned.storage.build(24, 32, False)
    module.hold(result.tensors)
    tunable = tuned.tunable(result, 32, 24)
    torch.testing.assert_close(tunable.weight(), module.dense_weight())
    assert all(torch.equal(t, result.tensors[n]) for n, t in tunable.tensors().items())
    with torch.no_grad():
        for value in tunable.values:
            value.mul_(1.25)
    module.hold(result.tensors | tunable.tensors())
    torch.testing.assert_close(module.dense_weight(), tunable.weight().detach(), rtol=2e-3, atol=5e-4)


def test_one_sample_is_enough_and_other_methods_are_refused() -> None:
    method = TunedQuIPSharp(sweeps=0, epochs=1)
    assert method.quantize_block(block(method, samples=1)).keys() == {"a", "b"}
    given = block(method)
    mixed = Block(given.weights, {"a": method, "b": QuIPSharp()}, given.inputs, given.targets, given.run)
    with pytest.raises(ValueError, match="b: quip_sharp and quip_sharp_tuned cannot be tuned together"):
        method.quantize_block(mixed)


@pytest.mark.parametrize("tuned", [m for _, m in PAIRS], ids=["quip_sharp", "aqlm"])
def test_a_model_is_tuned_layer_by_layer(tuned: Quantizer, tmp_path: Path) -> None:
    model = small()
    report = quantize(model, tuned, progress=False, calibration=ids(), epochs=1, learning_rate=1e-3)
    assert all(row.facts["layer_error"] <= row.facts["layer_error_before"] for row in report.rows)
    zoo.save(model, tmp_path / "saved", format="native")
    assert verify(model, tmp_path / "saved").logit_difference == 0
