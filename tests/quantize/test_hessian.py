"""Streaming second moments, and how modules share them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from zoo.quantize.capture import second_moments
from zoo.quantize.stats.hessian import BLOCK, Hessian, relative_output_error


@pytest.mark.parametrize("inputs", [1, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
def test_the_running_mean_is_the_mean(inputs: int) -> None:
    x = torch.randn(3, 40, inputs, generator=torch.Generator().manual_seed(0))
    hessian = Hessian(inputs, torch.float64)
    for part in x.flatten(0, 1).split([1, 50, 69]):
        hessian.update(part)
    flat = x.flatten(0, 1).double()
    assert hessian.tokens == 120
    torch.testing.assert_close(hessian.matrix, flat.T @ flat / 120, rtol=1e-10, atol=1e-10)


def test_no_tokens_change_nothing() -> None:
    hessian = Hessian(4)
    hessian.update(torch.empty(2, 0, 4))
    assert hessian.tokens == 0
    assert not hessian.matrix.any()


def test_low_precision_inputs_are_summed_in_float32() -> None:
    x = torch.full((5000, 2), 1.0).bfloat16()
    hessian = Hessian(2)
    for part in x.split(100):
        hessian.update(part)
    torch.testing.assert_close(hessian.matrix, torch.ones(2, 2))


def test_relative_output_error_is_that_of_the_outputs() -> None:
    x, w = torch.randn(64, 8), torch.randn(5, 8)
    rounded = w + 0.1 * torch.randn(5, 8)
    hessian = Hessian(8, torch.float64)
    hessian.update(x)
    exact = (x @ (w - rounded).T).norm() / (x @ w.T).norm()
    assert relative_output_error(w, rounded, hessian) == pytest.approx(float(exact), rel=1e-5)
    assert relative_output_error(w, w, hessian) == 0


class Branches(nn.Module):
    """a and b see one tensor, c another one of the same values, d is called only where asked, e twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(4, 4) for _ in "abcde")

    def forward(self, x: torch.Tensor, more: bool) -> torch.Tensor:
        y = self.a(x) + self.b(x) + self.c(x.clone())
        return self.e(self.e(y)) if not more else self.e(self.e(self.d(y)))


def watched(first_only: bool = False, more: tuple[bool, ...] = (False, True)) -> dict[str, Hessian]:
    torch.manual_seed(0)
    model = Branches()
    passes = [partial(model, torch.randn(2, 3, 4), flag) for flag in more]
    found = second_moments(dict(model.named_children()), passes, first_only)
    assert not any(m._forward_pre_hooks for m in model.modules())
    return found


def test_modules_with_the_same_input_share() -> None:
    found = watched()
    assert found["a"] is found["b"] is not found["c"]
    torch.testing.assert_close(found["a"].matrix, found["c"].matrix)
    assert {name: h.tokens for name, h in found.items()} == {"a": 12, "b": 12, "c": 12, "d": 6, "e": 24}


def test_only_the_first_input() -> None:
    assert watched(first_only=True).keys() == {"a", "b"}


def test_modules_never_called_are_left_out() -> None:
    assert "d" not in watched(more=(False,))


def test_hooks_are_removed_after_an_error() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError):
        second_moments({"m": model}, [lambda: model(torch.randn(2, 5))])
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("first_only", "last"), [(False, 1), (True, 1)])
def test_a_pass_ends_at_the_last_input_watched(first_only: bool, last: int) -> None:
    """All of the first pass runs, to learn what is called; of later ones only what is needed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    finished: list[int] = []
    model[2].register_forward_hook(lambda *_: finished.append(1))
    passes = [partial(model, torch.randn(2, 4)) for _ in range(3)]
    found = second_moments(dict(model.named_children()), passes, first_only)
    assert len(finished) == last
    assert {h.tokens for h in found.values()} == {6}


def test_a_module_that_only_later_passes_call_is_caught() -> None:
    assert watched(more=(False, True, False, True))["d"].tokens == 12
    assert watched(more=(True, False, True))["e"].tokens == 36
