"""QuIP, QuIP# and AQLM: rounding with feedback against naive versions, and what each is worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.components.numerics import e8
from zoo.components.numerics.hadamard import hadamard
from zoo.components.spec import SpecError, check, dump, load
from zoo.quantize.contracts import Quantizer
from zoo.quantize.methods import _additive
from zoo.quantize.methods._additive import Block, Sums
from zoo.quantize.methods._ldlq import damped_factor, descend, factored, ldlq
from zoo.quantize.methods.aqlm import AQLM
from zoo.quantize.methods.gptq import GPTQ
from zoo.quantize.methods.quip import QuIP
from zoo.quantize.methods.quip_sharp import QuIPSharp
from zoo.quantize.methods.rtn import RTN
from zoo.quantize.rules import quantizer
from zoo.quantize.stats.hessian import Hessian, relative_output_error

SMALL = AQLM(bits=5, rounds=2, steps=10)


def problem(outputs: int = 32, inputs: int = 96, seed: int = 0) -> tuple[Tensor, Hessian]:
    """A weight, and the Hessian of inputs that are correlated and of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    mix = torch.eye(inputs) + 0.3 * torch.randn(inputs, inputs, generator=generator)
    hessian = Hessian(inputs)
    hessian.update(torch.randn(300, inputs, generator=generator) @ mix * torch.linspace(0.1, 2, inputs))
    return weight, hessian


def rounded(method: Quantizer, weight: Tensor, hessian: Hessian | None) -> Tensor:
    module: Any = method.storage.build(weight.shape[1], weight.shape[0], False)
    module.hold(method.quantize(weight, hessian).tensors)
    return module.dense_weight(torch.float32)


def error(method: Quantizer, weight: Tensor, hessian: Hessian) -> float:
    return relative_output_error(weight, rounded(method, weight, hessian), hessian)


# ---- feedback ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4, 8])
def test_the_factor_is_block_lower(width: int) -> None:
    matrix = problem()[1].matrix.double()
    factor = factored(matrix, width)
    assert factor is not None
    blocks = torch.block_diag(*[torch.ones(width, width, dtype=torch.float64)] * (len(matrix) // width))
    assert not (factor.lower.triu(1) * (1 - blocks)).any()
    torch.testing.assert_close(factor.lower * blocks, torch.eye(len(matrix), dtype=torch.float64))
    torch.testing.assert_close(factor.lower @ torch.block_diag(*factor.middle) @ factor.lower.T, matrix)


@pytest.mark.parametrize("width", [1, 8])
def test_feedback_is_that_of_the_paper(width: int) -> None:
    """Every block, from the last, is rounded to what its weights and the error of those after it ask for."""
    weight, hessian = problem()
    weight, factor = weight.double() * 3, factored(hessian.matrix.double(), width)
    assert factor is not None
    found = ldlq(weight, factor, lambda x, metric: (x[:, 0].long(), x.round()))
    values = torch.zeros_like(weight)
    for start in reversed(range(0, weight.shape[1], width)):
        columns = slice(start, start + width)
        below = factor.lower.clone()
        below[: start + width] = 0
        values[:, columns] = (weight[:, columns] + ((weight - values) @ below)[:, columns]).round()
    assert torch.equal(found.values.T, values)
    torch.testing.assert_close(found.error.T, weight - values)


def test_sweeps_never_lose_and_end() -> None:
    weight, hessian = problem()
    weight, matrix = weight.double() * 3, hessian.matrix.double()
    factor = factored(matrix, 8)
    assert factor is not None

    def near(x: Tensor, metric: Tensor | None) -> tuple[Tensor, Tensor]:
        codes = e8.nearest_e8p(x, metric)
        return codes, e8.e8p(codes, x.dtype)

    found, losses = ldlq(weight, factor, near), []
    for _ in range(6):
        losses.append(float(((matrix @ found.error) * found.error).sum()))
        descend(found, matrix, 8, near, 1)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(found.values.T, e8.e8p(found.codes.T, torch.float64).flatten(1))
    assert descend(found, matrix, 8, near, 50) < 50


def test_damping_climbs_until_it_factors() -> None:
    matrix = torch.diag(torch.tensor([1.0, 1.0, 1.0, -0.03]))
    found = damped_factor(matrix, 1, 0.01)
    assert found is not None
    assert found[1] == {"damping": 0.05}
    assert damped_factor(torch.full((2, 2), torch.nan), 1, 0.01) is None


# ---- rotated methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [QuIP(bits=2), QuIPSharp(bits=2), QuIPSharp(bits=4)], ids=str)
def test_the_rotation_is_taken_back(method: Any) -> None:
    """What is stored is the rotated weight, near it in the rotated space."""
    weight, hessian = problem(outputs=40)
    module: Any = method.storage.build(96, 40, False)
    module.hold(method.quantize(weight, hessian).tensors)
    signs_in, signs_out = module.input_signs.float(), module.output_signs.float()
    assert set(signs_in.tolist()) == set(signs_out.tolist()) == {-1.0, 1.0}
    turned = hadamard(40) @ (weight * signs_in * signs_out[:, None]) @ hadamard(96).T
    inner = module.inner.dense_weight()
    assert torch.corrcoef(torch.stack((turned.flatten(), inner.flatten())))[0, 1] > 0.85
    assert torch.corrcoef(torch.stack((weight.flatten(), module.dense_weight().flatten())))[0, 1] > 0.85


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_each_method_beats_the_one_before(bits: Any) -> None:
    weight, hessian = problem(outputs=64, inputs=192)
    methods = [m(bits=bits, group_size=None) for m in (RTN, GPTQ)] + [m(bits=bits) for m in (QuIP, QuIPSharp)]
    errors = [error(m, weight, hessian) for m in methods]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.7 * errors[1]


def test_rotation_spreads_outliers() -> None:
    """A few huge weights and inputs, which no scalar grid per output survives."""
    weight, hessian = problem(outputs=64)
    weight[3] *= 30
    weight[:, 7] *= 20
    assert error(QuIPSharp(bits=2), weight, hessian) < 0.5 * error(GPTQ(bits=2, group_size=None), weight, hessian)


@pytest.mark.parametrize("method", [QuIP(), QuIPSharp(), SMALL], ids=str)
def test_no_tokens_and_hopeless_matrices_fall_back_and_say_so(method: Quantizer) -> None:
    weight, hessian = problem()
    for none in (None, Hessian(96)):
        result = method.quantize(weight, none)
        assert "no tokens" in result.facts["fallback"]
    assert (weight - rounded(method, weight, None)).norm() < 0.75 * weight.norm()
    if method is not SMALL:
        hessian._upper.fill_(torch.nan)
        assert method.quantize(weight, hessian).facts == {"fallback": "nearest: not factored"}


@pytest.mark.parametrize("method", [QuIP(bits=3), QuIPSharp(bits=3), SMALL], ids=str)
def test_results_are_the_storages_tensors_and_repeat(method: Quantizer) -> None:
    weight, hessian = problem()
    first, second = (method.quantize(weight, hessian).tensors for _ in range(2))
    infos = method.storage.tensors(96, 32, False)
    assert {n: (i.shape, i.dtype) for n, i in infos.items()} == {n: (t.shape, str(t.dtype)[6:]) for n, t in first.items()}
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert not check(method.storage, 96, 32, False)


@pytest.mark.parametrize("method", [QuIP(), QuIPSharp(), SMALL], ids=str)
def test_a_weight_of_zeros_stays_small(method: Quantizer) -> None:
    _, hessian = problem()
    q = rounded(method, torch.zeros(32, 96), hessian)
    assert q.isfinite().all()
    assert q.abs().max() < 1e-6


def test_a_factor_of_inputs_is_what_a_norms_weight_would_be() -> None:
    """Why tuning need not touch the norms before rotated modules: their weights' changes are among those of ``input_signs``."""
    weight, hessian = problem()
    module: Any = QuIPSharp(sweeps=0).storage.build(96, 32, False)
    module.hold(QuIPSharp(sweeps=0).quantize(weight, hessian).tensors)
    generator = torch.Generator().manual_seed(1)
    x, norm = torch.randn(5, 96, generator=generator), 1 + 0.25 * torch.randint(0, 4, (96,), generator=generator)
    expected = module(x * norm)
    module.hold(module.canonical() | {"input_signs": (module.input_signs.float() * norm).half()})
    torch.testing.assert_close(module(x), expected)


# ---- AQLM --------------------------------------------------------------------------------------------------------------------


def test_beam_search_finds_what_trying_all_does() -> None:
    generator = torch.Generator().manual_seed(0)
    books, (weight, hessian) = torch.randn(2, 4, 1, 8, generator=generator), problem(outputs=5, inputs=8)
    matrix, scale = hessian.matrix, torch.full((5, 1, 1), 0.3)
    codes = torch.randint(4, (5, 2), generator=generator)
    old = scale * (books[0][codes[:, 0]] + books[1][codes[:, 1]])
    left = weight[:, None] - old
    found, step = Block(books, matrix).search(left @ matrix, scale, codes, beam=16)
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    every = scale[:, None] * (books[0][pairs[:, 0]] + books[1][pairs[:, 1]])  # [5, 16, 1, 8]
    rest = weight[:, None, None] - every
    best = ((rest @ matrix) * rest).sum((2, 3)).argmin(-1)
    assert torch.equal(found, pairs[best])
    torch.testing.assert_close(old + step, every[torch.arange(5), best])


def test_a_search_never_loses() -> None:
    weight, hessian = problem()
    sums = _additive.first_values(weight, (2, 32, 2, 8), torch.Generator().manual_seed(0))
    losses = []
    for beam in (1, 1, 4, 4):
        left = weight - sums.weight()
        losses.append(float(((left @ hessian.matrix) * left).sum()))
        _additive.search(sums, weight, hessian.matrix, beam)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_fit_is_that_of_least_squares(outputs: int) -> None:
    """With steps enough no codebook is better: against a solver that is given the whole problem, in float64."""
    weight, hessian = problem(outputs=16, inputs=24)
    weight, matrix = weight.double(), hessian.matrix.double()
    sums = _additive.first_values(weight, (2, 4, outputs, 8), torch.Generator().manual_seed(0))
    before = weight - sums.weight()
    _additive.fit(sums, weight, matrix, 200)
    after = weight - sums.weight()
    root = torch.linalg.cholesky(matrix)
    one = torch.eye(sums.codebooks.numel(), dtype=torch.float64).view(-1, *sums.codebooks.shape)
    columns = torch.stack([(Sums(sums.indices, books, sums.scales).weight() @ root).flatten() for books in one], 1)
    rest = (weight @ root).flatten()
    best = (rest - columns @ torch.linalg.lstsq(columns, rest[:, None], driver="gelsd").solution[:, 0]).square().sum()
    losses = [float(((left @ matrix) * left).sum()) for left in (before, after)]
    assert losses[1] < 0.9 * losses[0]
    torch.testing.assert_close(losses[1], float(best), rtol=1e-6, atol=0)


def test_k_means_finds_separate_clusters_and_fills_empty_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 4, generator=generator) * 10
    points = (centres[:, None] + 0.01 * torch.randn(6, 20, 4, generator=generator)).flatten(0, 1)
    found, code = _additive.k_means(points, 40, generator)
    assert (points - found[code]).norm(dim=-1).max() < 0.1
    few, code = _additive.k_means(centres, 8, generator)  # fewer points than centres
    torch.testing.assert_close(few[code], centres)


def test_aqlm_beats_gptq_at_two_bits() -> None:
    weight, hessian = problem(outputs=128, inputs=128)
    assert error(AQLM(bits=8, rounds=2, steps=20), weight, hessian) < 0.6 * error(GPTQ(bits=2, group_size=None), weight, hessian)


def test_sums_decode_as_they_are_stored() -> None:
    weight, hessian = problem()
    result, module = SMALL.quantize(weight, hessian).tensors, SMALL.storage.build(96, 32, False)
    module.hold(result)
    sums = Sums(module.indices().long(), result["codebooks"].float(), result["scales"].float())
    torch.testing.assert_close(module.dense_weight(), sums.weight())


# ---- specs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quip", "quip_sharp", "aqlm"])
def test_specs_survive_dumping(name: str) -> None:
    spec = quantizer(name, {"bits": 3, "seed": 5})
    assert load(Quantizer, dump(spec)) == spec


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("quip", {"bits": 5}, "bits"),
        ("quip_sharp", {"damping": 0.0}, r"damping: must be above 0 and at most 1\.0, got 0\.0"),
        ("quip_sharp", {"sweeps": -1}, "sweeps: must be at least 0, got -1"),
        ("aqlm", {"bits": 17}, "bits: must be at most 16, got 17"),
        ("aqlm", {"beam": 0}, "beam: must be at least 1, got 0"),
    ],
)
def test_mistakes_are_named(name: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        quantizer(name, settings)
