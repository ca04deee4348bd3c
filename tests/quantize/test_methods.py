"""Quantization methods: what all keep to, and GPTQ against a naive version."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import zoo
from zoo.components.linear.packed_int import PackedInt
from zoo.components.numerics import integer, scaled
from zoo.components.spec import SpecError, dump, load
from zoo.quantize.contracts import IntegerQuantizer, Quantizer
from zoo.quantize.methods.gptq import GPTQ, inverse_factor
from zoo.quantize.methods.gptq_float import GPTQFloat
from zoo.quantize.methods.mxfp import MXFP
from zoo.quantize.methods.rtn import RTN
from zoo.quantize.rules import quantizer
from zoo.quantize.stats.hessian import Hessian, relative_output_error

ORDERS: tuple[Literal["natural", "activation", "groups"], ...] = ("natural", "activation", "groups")
METHODS = [p.name for p in zoo.parts("quantizer") if issubclass(p.spec, IntegerQuantizer)]


def problem(outputs: int = 6, inputs: int = 96, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Hessian]:
    """A weight, and the Hessian of inputs that are correlated and of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    mix = torch.eye(inputs) + 0.3 * torch.randn(inputs, inputs, generator=generator)
    x = torch.randn(300, inputs, generator=generator) @ mix * torch.linspace(0.1, 2, inputs)
    hessian = Hessian(inputs, dtype)
    hessian.update(x)
    return weight, hessian


def rounded(method: Quantizer, weight: Tensor, hessian: Hessian | None) -> Tensor:
    module = method.storage.build(weight.shape[1], weight.shape[0], False)
    module.hold(method.quantize(weight, hessian).tensors)
    return module.dense_weight(torch.float64)


def naive(method: GPTQ, weight: Tensor, hessian: Hessian) -> Tensor:
    """GPTQ as the paper states it: after each input, all later inputs are corrected at once."""
    w, h = weight.double(), hessian.matrix
    dead = h.diagonal() == 0
    h[dead, dead], w[:, dead] = h.diagonal()[~dead].mean(), 0
    size, grid = method.group_size or len(h), method.storage.grid
    order = torch.tensor(ordered(method.order, h.diagonal().tolist(), size))
    before = method.fit(w, grid)
    h = h[order][:, order] + method.damping * h.diagonal().mean() * torch.eye(len(h))
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    w, result = w[:, order], torch.zeros_like(w)
    scale = zero = torch.empty(0)
    for i, place in enumerate(order.tolist()):
        if method.order == "activation" or method.static_groups or method.group_size is None:
            scale, zero = (t[:, place // size, None] for t in before)
        elif i % size == 0:
            scale, zero = method.fit(w[:, i : i + size], grid)
        q = integer.dequantize(integer.quantize(w[:, i : i + 1], scale, zero, method.bits), scale, zero, torch.float64)[:, 0]
        w = w - torch.outer((w[:, i] - q) / upper[i, i], upper[i]) * (torch.arange(w.shape[1]) > i)
        result[:, place] = q
    return result


def ordered(order: str, sizes: list[float], group: int) -> list[int]:
    """Inputs in the order of the rounding."""
    keys = {
        "natural": lambda i: 0.0,
        "activation": lambda i: -sizes[i],
        "groups": lambda i: (-max(sizes[i // group * group : (i // group + 1) * group]), i // group, -sizes[i]),
    }
    return sorted(range(len(sizes)), key=keys[order])


@pytest.mark.parametrize(("order", "static"), [*((order, False) for order in ORDERS), ("groups", True)])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("inputs", "group"), [(96, 16), (96, 32), (320, 32), (384, 192), (96, None), (300, None), (40, 8)])
@pytest.mark.parametrize("search", ["minmax", "mse"])
def test_gptq_is_the_naive_one(order: Any, static: bool, symmetric: bool, inputs: int, group: int | None, search: Any) -> None:
    weight, hessian = problem(inputs=inputs)
    method = GPTQ(bits=3, group_size=group, symmetric=symmetric, order=order, static_groups=static, scale_search=search)
    torch.testing.assert_close(rounded(method, weight, hessian), naive(method, weight, hessian), rtol=1e-6, atol=1e-9)


def test_gptq_with_dead_inputs() -> None:
    weight, hessian = problem()
    weight[:, 5] = 100.0
    hessian._upper[5, :] = hessian._upper[:, 5] = 0
    for method in (GPTQ(group_size=16, order=order) for order in ORDERS):
        q = rounded(method, weight, hessian)
        torch.testing.assert_close(q, naive(method, weight, hessian), rtol=1e-6, atol=1e-9)
        assert not q[:, 5].any()
        assert q.abs().max() < 1  # the dead weight did not widen its group's grid


def test_gptq_with_independent_inputs_is_round_to_nearest() -> None:
    weight, _ = problem()
    hessian = Hessian(96, torch.float64)
    hessian.update(96**0.5 * torch.eye(96))
    for bits in (2, 3, 4, 8):
        for order in ORDERS:
            gptq = GPTQ(bits=bits, group_size=32, order=order)
            assert torch.equal(rounded(gptq, weight, hessian), rounded(RTN(bits=bits, group_size=32), weight.double(), None))


def test_gptq_does_not_depend_on_the_size_of_the_inputs() -> None:
    weight, hessian = problem()
    before = rounded(GPTQ(group_size=32), weight, hessian)
    hessian._upper *= 2.0**20
    assert torch.equal(before, rounded(GPTQ(group_size=32), weight, hessian))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "settings",
    [{}, {"order": "activation"}, {"order": "groups"}, {"scale_search": "mse"}, {"symmetric": False}, {"group_size": None}],
    ids=str,
)
def test_gptq_errs_less_than_round_to_nearest(bits: int, settings: dict[str, Any]) -> None:
    weight, hessian = problem(outputs=32, inputs=192, dtype=torch.float32)
    gptq = quantizer("gptq", {"bits": bits, **settings})
    plain = quantizer("rtn", {"bits": bits, **{k: v for k, v in settings.items() if k != "order"}})
    errors = [relative_output_error(weight, rounded(m, weight, hessian).float(), hessian) for m in (gptq, plain)]
    assert errors[0] < 0.9 * errors[1]


def test_more_bits_err_less() -> None:
    weight, hessian = problem(dtype=torch.float32)
    for method in METHODS:
        errors = [
            relative_output_error(weight, rounded(quantizer(method, {"bits": b, "group_size": 32}), weight, hessian).float(), hessian)
            for b in (2, 3, 4, 8)
        ]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 0.01


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_results_are_the_storages_tensors(method: str, bits: int, group: int | None, symmetric: bool) -> None:
    weight, hessian = problem(dtype=torch.float32)
    spec = quantizer(method, {"bits": bits, "group_size": group, "symmetric": symmetric})
    result = spec.quantize(weight, hessian)
    infos = spec.storage.own_tensors(96, 6, False)
    assert spec.storage == PackedInt(bits=spec.bits, group_size=group, symmetric=symmetric)  # type: ignore[attr-defined]
    assert {n: (i.shape, i.dtype) for n, i in infos.items()} == {n: (t.shape, str(t.dtype)[6:]) for n, t in result.tensors.items()}


# ---- damping and fallbacks ---------------------------------------------------------------------------------------------------


def test_the_damping_ladder_climbs_until_it_factors() -> None:
    matrix = torch.diag(torch.tensor([1.0, 1.0, 1.0, -0.03]))  # not positive: .01 of the mean .74 does not mend it, .05 does
    factor, facts = inverse_factor(matrix, 0.01)
    assert facts == {"damping": 0.05}
    damped = matrix + 0.05 * matrix.diagonal().mean() * torch.eye(4)
    torch.testing.assert_close(factor, torch.linalg.cholesky(damped.inverse(), upper=True))
    assert inverse_factor(matrix, 0.2)[1] == {"damping": 0.2}
    assert inverse_factor(torch.diag(torch.tensor([1.0, -3.0])), 0.01)[0] is None
    assert inverse_factor(torch.full((2, 2), torch.nan), 0.01)[0] is None


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("method", [GPTQ(bits=4, group_size=32), GPTQ(bits=4, group_size=32, order="activation"), GPTQFloat(grid=MXFP())])
def test_inputs_that_are_always_0_change_nothing_for_the_others(method: Any, size: float) -> None:
    """Damping is a share of what the living inputs have, however large they are."""
    torch.manual_seed(0)
    weight, mix = torch.randn(32, 128), torch.randn(128, 128)
    x = torch.randn(400, 128) @ mix * size
    x[:, 96:] = 0
    errors = []
    for width in (96, 128):
        hessian = Hessian(width)
        hessian.update(x[:, :width])
        found = rounded(method, weight[:, :width], hessian).float()[:, :96]
        errors.append(float(((weight[:, :96] - found) @ x[:, :96].T).norm() / (weight[:, :96] @ x[:, :96].T).norm()))
    assert errors[1] == pytest.approx(errors[0], rel=0.03)


def test_float64_is_tried_before_more_damping() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64, generator=generator))[0]
    matrix = (basis * torch.cat([torch.full((1,), 1e9), torch.full((63,), 1e-3)])) @ basis.T
    share = 1e-9  # the condition number stays beyond float32
    single = matrix.float() + share * matrix.float().diagonal().mean() * torch.eye(64)
    assert torch.linalg.cholesky_ex(single)[1] > 0
    assert inverse_factor(matrix.float(), share)[1]["damping"] > 0
    assert inverse_factor(torch.ones(2, 2), share)[1] == {"damping": share, "factored_in": "float64"}
    assert inverse_factor(matrix, share)[1] == {"damping": share}


@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_a_hopeless_matrix_falls_back_and_says_so(fill: float) -> None:
    weight, hessian = problem(dtype=torch.float32)
    hessian._upper.fill_(fill)
    result = GPTQ(group_size=32).quantize(weight, hessian)
    assert result.facts == {"fallback": "rtn: not factored"}
    plain = RTN(group_size=32).quantize(weight, None).tensors
    assert all(torch.equal(result.tensors[n], plain[n]) for n in plain)


def test_no_tokens_fall_back_and_say_so() -> None:
    weight, _ = problem()
    for hessian in (None, Hessian(96)):
        assert GPTQ(group_size=32).quantize(weight, hessian).facts == {"fallback": "rtn: no tokens"}


def test_fewer_tokens_than_inputs() -> None:
    weight, _ = problem()
    hessian = Hessian(96)
    hessian.update(torch.randn(3, 96))
    result = GPTQ(group_size=32).quantize(weight, hessian)
    assert "fallback" not in result.facts


# ---- specs -------------------------------------------------------------------------------------------------------------------


def test_mistakes_give_the_nearest_word() -> None:
    with pytest.raises(SpecError, match="no quantizer named 'gptk'; did you mean 'gptq'"):
        quantizer("gptk", {})
    with pytest.raises(SpecError, match=r"group_sise: quantizer gptq has no such field; did you mean 'group_size'"):
        quantizer("gptq", {"group_sise": 32})
    with pytest.raises(SpecError, match=r"damping: must be above 0 and at most 1\.0, got 0\.0"):
        quantizer("gptq", {"damping": 0.0})
    with pytest.raises(SpecError) as error:
        quantizer("rtn", {"bits": 5, "symmetric": "yes", "order": "groups"})
    assert len(error.value.errors) >= 3


@pytest.mark.parametrize("method", METHODS)
def test_specs_survive_dumping(method: str) -> None:
    spec = quantizer(method, {"bits": 3, "group_size": None})
    assert load(Quantizer, dump(spec)) == spec
    assert quantizer(spec, {}) == spec
    assert quantizer(spec, {"bits": 2}) == quantizer(method, {"bits": 2, "group_size": None})


def test_static_groups_have_the_scales_of_the_original_weight() -> None:
    weight, x = torch.randn(24, 128), torch.randn(400, 128) * torch.rand(128)
    hessian = Hessian(128)
    hessian.update(x)
    fixed, moving = (GPTQ(group_size=32, static_groups=s).quantize(weight, hessian).tensors["scale"] for s in (True, False))
    expected, _ = integer.fit(weight, GPTQ(group_size=32).storage.grid)
    assert torch.equal(fixed, expected)
    assert not torch.equal(moving, expected)


def uneven(outputs: int = 48, inputs: int = 256) -> tuple[Tensor, Hessian]:
    """A weight, and the Hessian of correlated inputs of which a few, late and scattered, are many times larger than the others."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(outputs, inputs, generator=generator)
    size = 0.2 + torch.rand(inputs, generator=generator)
    size[inputs // 2 + torch.randperm(inputs // 2, generator=generator)[:12]] *= 20
    mix = torch.eye(inputs) + 0.2 * torch.randn(inputs, inputs, generator=generator) / inputs**0.5
    hessian = Hessian(inputs)
    hessian.update(torch.randn(1024, inputs, generator=generator) @ mix @ torch.diag(size))
    return weight, hessian


@pytest.mark.parametrize("bits", [3, 4])
def test_orders_err_less_where_activations_are_uneven(bits: Any) -> None:
    weight, hessian = uneven()
    methods = {order: GPTQ(bits=bits, group_size=32, order=order) for order in ORDERS}
    errors = {order: relative_output_error(weight, rounded(m, weight, hessian).float(), hessian) for order, m in methods.items()}
    assert errors["groups"] < errors["natural"]
    assert errors["activation"] < errors["natural"]


def test_groups_stay_whole_and_their_scales_are_fitted_when_the_rounding_arrives() -> None:
    """The group of the largest input comes first, so its scales are those of the original weight; all others' are of corrected ones."""
    weight, hessian = uneven()
    sizes = hessian.matrix.diagonal()
    first = int(sizes.argmax()) // 32
    method = GPTQ(group_size=32, order="groups")
    order = method._order(sizes)
    assert order is not None
    assert order.tolist() == ordered("groups", sizes.tolist(), 32)
    assert all(len(set(group)) == 1 for group in (order // 32).view(-1, 32).tolist())
    expected, _ = integer.fit(weight, method.storage.grid)
    scale = method.quantize(weight, hessian).tensors["scale"]
    assert [g for g in range(8) if torch.equal(scale[:, g], expected[:, g])] == [first]


# ---- GPTQ on grids of floats ---------------------------------------------------------------------------------------------------

GRIDS: list[Any] = ["nvfp4", "mxfp", {"name": "mxfp", "element": "e2m3"}, "fp6", "fp8", {"name": "fp8", "scale_per": "block"},
                    {"name": "fp8", "scale_per": "tensor"}, {"name": "nvfp4", "four_over_six": True}]  # fmt: skip


def naive_float(method: GPTQFloat, weight: Tensor, hessian: Hessian) -> Tensor:
    """After each input, all later inputs are corrected at once; the grid is what the storage gives for every output's own number."""
    w, h, grid = weight.double(), hessian.matrix.double(), method.storage.grid
    order = torch.tensor(ordered(method.order, h.diagonal().tolist(), 1))
    scale, tensor = method.floats.fit(weight)
    h = h + method.damping * h.diagonal().mean() * torch.eye(len(h))
    upper = torch.linalg.cholesky(torch.linalg.inv(h[order][:, order]), upper=True)
    result = torch.zeros_like(w)
    for i, place in enumerate(order.tolist()):
        result[:, place] = scaled.rounded(w, scaled.effective(scale, tensor, grid), grid)[:, place].double()
        later = order[i + 1 :]
        w[:, later] -= torch.outer((w[:, place] - result[:, place]) / upper[i, i], upper[i, i + 1 :])
    return result


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("order", ["natural", "activation"])
def test_gptq_on_floats_is_the_naive_one_and_errs_less_than_the_nearest(grid: Any, order: Any) -> None:
    weight, hessian = problem(outputs=24, inputs=160, dtype=torch.float32)
    method = quantizer("gptq_float", {"grid": grid, "order": order})
    assert isinstance(method, GPTQFloat)
    found, expected = rounded(method, weight, hessian), naive_float(method, weight, hessian)
    assert (found - expected).abs().gt(1e-6).double().mean() < 0.01  # of the two, one is in float32: a few numbers lie between two
    errors = [relative_output_error(weight, rounded(m, weight, hessian).float(), hessian) for m in (method, method.grid)]
    assert errors[0] < 0.9 * errors[1]


def test_gptq_on_floats_without_tokens_is_the_nearest_and_says_so() -> None:
    weight, _ = problem(inputs=160, dtype=torch.float32)
    result = GPTQFloat().quantize(weight, None)
    plain = GPTQFloat().grid.quantize(weight, None).tensors
    assert result.facts == {"fallback": "nearest: no tokens"}
    assert all(torch.equal(result.tensors[n], plain[n]) for n in plain)


def test_gptq_on_floats_shares_the_tensor_scale_of_siblings_and_scales_inputs() -> None:
    weight, hessian = problem(inputs=160, dtype=torch.float32)
    method = quantizer("gptq_float", {"grid": {"name": "nvfp4", "round_inputs": True}})
    shared = method.for_siblings([weight, 3 * weight])
    tensors = shared.quantize(weight, hessian).tensors
    expected = method.quantize(3 * weight, hessian).tensors
    assert torch.equal(tensors["divisor"], expected["divisor"])
    assert torch.equal(tensors["input_divisor"], expected["input_divisor"])
    assert load(Quantizer, dump(shared)) == shared


def test_gptq_on_floats_refuses_other_grids() -> None:
    with pytest.raises(SpecError, match=r"grid: must be a method of few-bit floats \(nvfp4, mxfp, fp8, fp6\), got rtn"):
        quantizer("gptq_float", {"grid": "rtn"})
