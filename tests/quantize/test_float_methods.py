"""The quantizers of few-bit floats: what they promise of a weight, and what they are worth on trained models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.quantize.models import ids, same_bits, small
from tests.quantize.test_real_models import perplexity, quantized
from zoo.components.linear.packed_float import PackedFloat
from zoo.components.numerics import scaled
from zoo.components.spec import SpecError, dump, load
from zoo.quantize import quantize, verify
from zoo.quantize.contracts import Quantizer
from zoo.quantize.methods.fp8 import FP8
from zoo.quantize.methods.mxfp import MXFP
from zoo.quantize.methods.nvfp4 import NVFP4
from zoo.quantize.rules import quantizer
from zoo.quantize.stats.hessian import Hessian

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *(("fp8", {"scale_per": per}) for per in ("tensor", "channel", "block")),
    ("fp8", {"element": "e5m2"}),
    ("fp8", {"inputs": "tensor"}),
    ("fp6", {}),
    ("fp6", {"element": "e2m3"}),
    *(("mxfp", {"element": element}) for element in ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")),
    ("mxfp", {"input_element": "e4m3", "scale_rule": "floor"}),
    ("nvfp4", {}),
    ("nvfp4", {"four_over_six": True, "tensor_scale": "multiplier"}),
    ("nvfp4", {"round_inputs": True}),
]


def weights(outputs: int = 48, inputs: int = 256, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) / inputs**0.5


def seen(largest: float, inputs: int = 256) -> Hessian:
    hessian = Hessian(inputs)
    hessian.update(torch.linspace(-largest, largest / 2, inputs)[None])
    return hessian


def error(method: Quantizer, weight: Tensor) -> float:
    return float((method.rounded(weight) - weight).norm() / weight.norm())


# ---- one weight --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_results_are_the_storages_tensors(name: str, settings: dict[str, Any]) -> None:
    method = quantizer(name, settings)
    result = method.quantize(weights(), seen(3.0))
    infos = method.storage.own_tensors(256, 48, False)
    assert {n: (i.shape, i.dtype) for n, i in infos.items()} == {n: (t.shape, str(t.dtype)[6:]) for n, t in result.tensors.items()}
    assert "fallback" not in result.facts
    assert load(Quantizer, dump(method)) == method


def test_precision_orders_the_errors() -> None:
    weight = weights()
    found = {str(s): error(quantizer(*s), weight) for s in SETTINGS}
    fp8, e5m2, fp6 = error(FP8(), weight), error(FP8(element="e5m2"), weight), error(quantizer("fp6", {"element": "e2m3"}), weight)
    assert fp8 < 0.03 < e5m2 < 0.06  # half a step of 2^-3 and of 2^-2, over the exponents
    assert error(MXFP(element="e4m3"), weight) < error(MXFP(element="e2m3"), weight) < error(MXFP(), weight)
    assert max(found.values()) < 0.13
    assert fp6 < error(NVFP4(four_over_six=True), weight) < error(NVFP4(), weight) < error(MXFP(), weight)


def test_four_over_six_is_the_best_of_two_scales_for_each_group() -> None:
    weight, method = weights(), NVFP4(four_over_six=True)
    scale, tensor = method.fit(weight)
    grid = method.storage.grid
    assert tensor == 256 * 6 / weight.abs().max()
    most = scaled.largest(weight, grid)
    errors = []
    for span in (most, 1.5 * most):
        near = scaled.rounded(weight, scaled.effective(scaled.store(span, grid, tensor), tensor, grid), grid)
        errors.append((near - weight).unflatten(-1, (-1, 16)).square().sum(-1))
    best = torch.minimum(*errors)
    chosen = (scaled.rounded(weight, scaled.effective(scale, tensor, grid), grid) - weight).unflatten(-1, (-1, 16)).square().sum(-1)
    assert torch.equal(chosen, best)
    assert 0.1 < (errors[1] < errors[0]).float().mean() < 0.9  # both are chosen


@pytest.mark.parametrize("four_over_six", [True, False])
def test_siblings_share_the_tensor_scale(four_over_six: bool) -> None:
    small_one, large = weights(), 3 * weights(seed=1)
    method = NVFP4(four_over_six=four_over_six)
    shared = method.for_siblings([small_one, large])
    assert shared == NVFP4(four_over_six=four_over_six, largest=float(large.abs().max()))
    tensors = [shared.quantize(w, None).tensors["divisor"] for w in (small_one, large)]
    assert torch.equal(*tensors)
    assert torch.equal(tensors[1], method.quantize(large, None).tensors["divisor"])
    assert NVFP4().for_siblings([torch.zeros(2, 16)]).largest is None
    assert FP8().for_siblings([small_one, large]) == FP8()


@pytest.mark.parametrize("rule", ["floor", "round", "ceil"])
def test_the_scale_rule_is_used(rule: Any) -> None:
    weight = weights()
    weight[0, :32] = torch.linspace(-7.0, 7.0, 32)
    exponent = MXFP(scale_rule=rule).quantize(weight, None).tensors["scale"][0, 0].item() - 127
    assert exponent == (0 if rule == "floor" else 1)


# ---- inputs with a fixed scale -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "tensor", "wanted"),
    [
        ("fp8", {"inputs": "tensor"}, "input_multiplier", 3.0 / 448),
        ("nvfp4", {"round_inputs": True}, "input_divisor", 448 * 6 / 3.0),
        ("nvfp4", {"round_inputs": True, "tensor_scale": "multiplier"}, "input_multiplier", 3.0 / (448 * 6)),
    ],
)
def test_fixed_scales_span_the_largest_input(name: str, settings: dict[str, Any], tensor: str, wanted: float) -> None:
    method = quantizer(name, settings)
    assert method.calibrated
    assert not quantizer(name, {}).calibrated
    assert method.quantize(weights(), seen(3.0)).tensors[tensor].item() == pytest.approx(wanted)
    for hessian in (None, Hessian(256)):
        result = method.quantize(weights(), hessian)
        assert result.tensors[tensor].item() == 1
        assert result.facts == {"fallback": "inputs not scaled: no tokens"}


def test_the_largest_input_is_that_of_all_batches() -> None:
    hessian = Hessian(4)
    for batch in (torch.tensor([[1.0, -5.0, 0, 0]]), torch.empty(0, 4), torch.tensor([[2.0, 0, 0, 0]])):
        hessian.update(batch)
    assert hessian.largest == 5.0


def test_mistakes_are_named() -> None:
    with pytest.raises(SpecError, match="largest: must be above 0"):
        quantizer("nvfp4", {"largest": 0.0})
    with pytest.raises(SpecError, match="inputs"):
        quantizer("fp8", {"inputs": "channel"})
    with pytest.raises(SpecError, match="element"):
        quantizer("fp6", {"element": "e4m3"})
    with pytest.raises(ValueError, match="40 inputs do not divide into groups of 16"):
        quantize(small({"name": "gated", "hidden": 40}), "nvfp4", progress=False)


# ---- whole models ------------------------------------------------------------------------------------------------------------


def test_siblings_of_a_model_share_the_tensor_scale() -> None:
    model = small()
    quantize(model, "nvfp4", progress=False)
    for layer in model.layers:
        q, k, v = (layer.mixer.projection.get_submodule(name).divisor for name in ("q", "k", "v"))
        assert torch.equal(q, k)
        assert torch.equal(q, v)
        assert torch.equal(layer.mlp.gate.divisor, layer.mlp.up.divisor)
        assert not torch.equal(layer.mlp.gate.divisor, layer.mlp.down.divisor)


@pytest.mark.parametrize(("name", "settings"), [("fp6", {}), ("fp8", {"element": "e5m2"}), ("mxfp", {"element": "e3m2"})])
def test_what_no_other_tool_holds_is_saved_in_the_native_format(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = zoo.load(zoo_folder(tmp_path))
    quantize(model, name, progress=False, **settings)
    with pytest.raises(ValueError, match="compressed-tensors has no scheme for"):
        zoo.save(model, tmp_path / "refused", format="compressed_tensors")
    zoo.save(model, tmp_path / "saved", format="native")
    assert verify(model, tmp_path / "saved").logit_difference == 0
    assert same_bits(zoo.load(tmp_path / "saved"), model)


def zoo_folder(folder: Path) -> Path:
    from tests.zoo.oracle import llama_checkpoint

    llama_checkpoint(folder / "model", hidden_size=64, intermediate_size=96, head_dim=16, max_position_embeddings=64)
    return folder / "model"


def test_a_run_with_rounded_inputs_is_taken_up_again(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        model = small()
        quantize(model, "nvfp4", round_inputs=True, calibration=ids(), work_dir=tmp_path / "work", progress=False)
        results.append(model)
    assert same_bits(*results)
    assert isinstance(results[0].layers[0].mlp.down.spec, PackedFloat)


def nll(path: Path, windows: int, method: str, **settings: Any) -> float:
    return perplexity(quantized(path, method, **settings), windows)


def test_fp8_is_nearly_free_on_a_small_model(shared_data: Path) -> None:
    path = shared_data / "weights/stories260K"
    before = perplexity(zoo.load(path, dtype="float32"), 8)
    assert nll(path, 8, "fp8", inputs="token") == pytest.approx(before, rel=0.03)
    assert nll(path, 8, "mxfp", element="e4m3", rules=["*.mlp.down=keep"]) == pytest.approx(before, rel=0.03)


@pytest.mark.slow
def test_orderings_on_a_trained_model(shared_data: Path) -> None:
    """NVFP4 is better than MXFP4, weights only and with inputs; FP8 is nearly free."""
    path, rules = shared_data / "weights/babyllama", ["*.mlp.down={name: mxfp, element: e4m3}"]
    before = perplexity(zoo.load(path, dtype="float32"))
    found = {
        "fp8": nll(path, 24, "fp8", inputs="token"),
        "nvfp4": nll(path, 24, "nvfp4", rules=rules),
        "mxfp4": nll(path, 24, "mxfp", rules=rules),
        "nvfp4 inputs": nll(path, 24, "nvfp4", round_inputs=True, rules=rules, samples=16, length=256),
        "mxfp4 inputs": nll(path, 24, "mxfp", input_element="e2m1", rules=rules),
    }
    assert found["fp8"] == pytest.approx(before, rel=0.015)
    assert before < found["nvfp4"] < found["mxfp4"]
    assert found["nvfp4"] < found["nvfp4 inputs"] < found["mxfp4 inputs"], found
