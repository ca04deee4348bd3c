"""Softmax in its published forms against torch in float64, at extreme values, and the merge of partial results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zoo.components.ops import softmax as ops

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "naive": ops.naive,
    "safe": ops.safe,
    "online": lambda x: ops.online(x, 3),
    "tempered": lambda x: ops.tempered(x, 1.0),
    "with_sink": lambda x: ops.with_sink(x, x.new_tensor(-torch.inf)),
}
stable = pytest.mark.parametrize("name", [n for n in FORMS if n != "naive"])


def logits(*shape: int, scale: float = 3.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(scale).to(dtype)


@pytest.mark.parametrize("name", FORMS)
def test_equals_torch_with_gradients(name: str) -> None:
    x = logits(4, 10).requires_grad_()
    weight = logits(4, 10)
    got, want = FORMS[name](x), x.softmax(-1)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    grads = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", FORMS)
def test_fp32_is_as_near_to_float64_as_torch_is(name: str) -> None:
    x = logits(64, 200, dtype=torch.float32)
    exact = x.double().softmax(-1)
    error = (FORMS[name](x).double() - exact).abs().max()
    assert error <= 4 * (x.softmax(-1).double() - exact).abs().max()


@stable
def test_large_and_small_logits(name: str) -> None:
    x = torch.tensor([[1e30, 1e30, -1e30], [-1e4, -1e4 - 1, -2e4], [torch.finfo(torch.float32).max, 0.0, 0.0]])
    torch.testing.assert_close(FORMS[name](x), x.softmax(-1))


def test_naive_overflows_where_the_others_do_not() -> None:
    assert ops.naive(torch.tensor([[100.0, 0.0]])).isnan().any()


@pytest.mark.parametrize("name", FORMS)
def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient(name: str) -> None:
    x = torch.full((2, 5), -torch.inf)
    x[1, 2] = 1.0
    x.requires_grad_()
    y = FORMS[name](x)
    assert torch.equal(y, torch.tensor([[0.0] * 5, [0, 0, 1.0, 0, 0]]))
    y.square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(2, 5))


def test_a_sink_is_one_more_logit_that_is_dropped() -> None:
    x, sink = logits(3, 6), logits(3)
    want = torch.cat([x, sink[:, None]], -1).softmax(-1)[:, :-1]
    torch.testing.assert_close(ops.with_sink(x, sink), want)
    assert torch.equal(ops.with_sink(torch.full((1, 3), -torch.inf), torch.zeros(1)), torch.zeros(1, 3))
    huge = ops.with_sink(torch.zeros(1, 3), torch.tensor([1e30]))
    assert torch.equal(huge, torch.zeros(1, 3))


def test_temperature_divides_and_zero_is_the_argmax() -> None:
    x = logits(3, 6)
    torch.testing.assert_close(ops.tempered(x, 0.3), (x / 0.3).softmax(-1))
    per_row = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    got = ops.tempered(x, per_row)
    assert torch.equal(got[0], torch.nn.functional.one_hot(x[0].argmax(), 6).double())
    torch.testing.assert_close(got[1:], (x / per_row)[1:].softmax(-1))
    assert torch.equal(ops.tempered(torch.tensor([2.0, 2.0, 1.0]), 0.0), torch.tensor([0.5, 0.5, 0.0]))


def whole(x: Tensor, v: Tensor) -> ops.Partial:
    return ops.Running.start(v.new_zeros(*x.shape[:-1], 1), v.shape[-1]).add(x, v).end()


@pytest.mark.parametrize("cuts", [[9], [4, 5], [1, 1, 7], [0, 9]], ids=str)
def test_parts_merge_to_the_whole(cuts: list[int]) -> None:
    x, v = logits(2, 5, 9).requires_grad_(), logits(2, 9, 3).requires_grad_()
    masked = x.masked_fill(torch.arange(9) > torch.tensor([0, 3, 8, 8, 8])[:, None], -torch.inf)  # first parts see, last ones do not
    parts = [whole(a, b) for a, b in zip(masked.split(cuts, -1), v.split(cuts, -2), strict=True) if a.shape[-1]]
    merged = ops.merge(parts)
    want = masked.softmax(-1) @ v
    torch.testing.assert_close(merged.o, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(merged.lse, masked.logsumexp(-1), rtol=1e-10, atol=1e-12)
    grads = [torch.autograd.grad(o.square().sum(), (x, v), retain_graph=True) for o in (merged.o, want)]
    for got, exact in zip(*grads, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-8, atol=1e-10)


def test_merging_parts_that_saw_nothing_gives_zero() -> None:
    empty = whole(torch.full((1, 2, 3), -torch.inf), torch.ones(1, 3, 4))
    merged = ops.merge([empty, empty])
    assert torch.equal(merged.o, torch.zeros(1, 2, 4))
    assert (merged.lse == -torch.inf).all()
    full = whole(torch.zeros(1, 2, 3), torch.ones(1, 3, 4))
    torch.testing.assert_close(ops.merge([empty, full]).o, full.o)


def test_merge_holds_for_extreme_maxima() -> None:
    x, v = torch.tensor([[[1e4, -1e4, 0.0, 1e4]]]), torch.arange(4.0)[None, :, None]
    parts = [whole(a, b) for a, b in zip(x.split(1, -1), v.split(1, -2), strict=True)]
    torch.testing.assert_close(ops.merge(parts).o, torch.tensor([[[1.5]]]))
