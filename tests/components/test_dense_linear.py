"""The dense linear's arrangement in memory: the same product, names and bytes whatever the layout."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zoo.components.contracts import Prepared
from zoo.components.linear.dense import Dense, DenseLinear
from zoo.components.ops.few_rows import FEW, by_columns, few_rows, suits

arranges = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="weights are arranged by columns only where MKL multiplies")


def linear(inputs: int = 512, outputs: int = 192, bias: bool = True) -> DenseLinear:
    torch.manual_seed(0)
    module = Dense().build(inputs, outputs, bias)
    assert isinstance(module, DenseLinear)
    assert isinstance(module, Prepared)
    return module


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 2, FEW])
def test_few_rows_is_the_product(rows: int) -> None:
    x, weight = torch.randn(rows, 64), torch.randn(64, 48).t()
    torch.testing.assert_close(few_rows(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-5)


@arranges
@pytest.mark.parametrize("shape", [(512,), (1, 512), (1, 1, 512), (2, 8, 512), (2, FEW, 512), (0, 512)])
@pytest.mark.parametrize("bias", [True, False])
def test_arranged_linear_says_the_same(shape: tuple[int, ...], bias: bool, two_threads: None) -> None:
    module = linear(bias=bias)
    x = torch.randn(shape)
    plain = F.linear(x, module.weight.contiguous(), module.bias)
    module.prepare()
    assert by_columns(module.weight)
    torch.testing.assert_close(module(x), plain, rtol=1e-5, atol=1e-5)


@arranges
def test_gradients_pass_through_the_arranged_product() -> None:
    module = linear()
    other = copy.deepcopy(module)
    module.prepare()
    x = torch.randn(3, 512)
    for m in (module, other):
        m(x).square().sum().backward()
    torch.testing.assert_close(module.weight.grad, other.weight.grad, rtol=1e-4, atol=1e-4)


@arranges
def test_casts_leave_the_arrangement_and_come_back_to_it() -> None:
    module = linear()
    module.prepare()
    weight = module.weight
    assert not by_columns(module.to(torch.bfloat16).weight)
    assert by_columns(module.to(torch.float32).weight)
    assert module.weight is weight, "ties are by the parameter, which must stay the same one"


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (510, 192)])
def test_small_and_indivisible_weights_stay_as_they_are(inputs: int, outputs: int) -> None:
    module = linear(inputs, outputs)
    module.prepare()
    assert module.weight.is_contiguous()


def test_a_view_of_stacked_weights_is_not_copied_away() -> None:
    stack = torch.randn(4, 192, 512)
    module = linear()
    module.weight = nn.Parameter(stack[1])
    module.prepare()
    assert module.weight.data_ptr() == stack[1].data_ptr()


@arranges
def test_state_dict_round_trip_across_arrangements() -> None:
    module, other = linear(), linear()
    module.prepare()
    with torch.no_grad():
        other.weight.zero_()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.weight, module.weight)


def test_the_split_product_is_taken_where_it_suits(two_threads: None) -> None:
    weight = torch.randn(512, 192).t()
    assert suits(torch.randn(FEW, 512), weight)
    assert not suits(torch.randn(FEW + 1, 512), weight)
    assert not suits(torch.randn(1, 512), weight.contiguous())
    assert not suits(torch.randn(1, 510), torch.randn(510, 192).t())
    assert not suits(torch.randn(1, 512).double(), weight.double())
    torch.set_num_threads(1)
    assert not suits(torch.randn(1, 512), weight)


@arranges
def test_autocast_gives_its_own_dtype_whatever_the_rows(two_threads: None) -> None:
    module = linear()
    module.prepare()
    with torch.autocast("cpu", torch.bfloat16):
        assert {module(torch.randn(rows, 512)).dtype for rows in (1, FEW, FEW + 1)} == {torch.bfloat16}


@arranges
@pytest.mark.slow
def test_it_compiles_without_a_break(two_threads: None) -> None:
    module, x = linear(), torch.randn(1, 512)
    module.prepare()
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))
