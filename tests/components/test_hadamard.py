"""Hadamard matrices: orthonormal at every width that models have, and the fast product is the plain one."""

from __future__ import annotations

import pytest
import torch

from zoo.components.numerics.hadamard import hadamard, random_signs, signs_of, supported, transform

ORDERS = [1, 2, 12, 20, 28, 36, 44, 52, 60, 68, 76, 100, 108, 124, 140, 148, 164, 180, 244, 284, 312, 344, 464, 684, 924]
# Llama-2 7B and 13B, Llama-3, Qwen2.5 0.5B, 1.5B, 7B and 72B, Qwen3 4B, 14B and 32B, gpt-oss, DeepSeek-V2-Lite, DeepSeek-V3, Gemma-3-1B,
# SmolLM, Falcon-7B, and the three bases without a Paley matrix at the widths where a larger one takes over
WIDTHS = [11008, 13824, 14336, 4864, 8960, 18944, 29568, 9728, 17408, 25600, 2880, 10944, 1408, 18432, 1152, 6912, 576, 4544,
          4096, 5120, 8192, 116 * 4, 156 * 2, 172 * 2]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_a_matrix_of_signs_is_orthogonal(order: int) -> None:
    h = hadamard(order, torch.float64)
    torch.testing.assert_close(h @ h.T, torch.eye(order, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(h.abs(), torch.full_like(h, order**-0.5))


@pytest.mark.parametrize("order", [12, 28, 36, 76, 344])
def test_bases_are_exact(order: int) -> None:
    h = signs_of(order, torch.float32, torch.device("cpu"))
    assert torch.equal(h @ h.T, order * torch.eye(order))


@pytest.mark.parametrize("width", WIDTHS)
def test_widths_of_models(width: int) -> None:
    """Every entry +-n^-1/2 and rows orthonormal: seen on some rows and columns, and by the product with the inverse."""
    assert supported(width)
    x = torch.randn(3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0] = torch.nn.functional.one_hot(torch.tensor(width - 3), width)
    y = transform(x)
    torch.testing.assert_close(y[0].abs(), torch.full_like(y[0], width**-0.5))
    torch.testing.assert_close(y @ y.T, x @ x.T)
    torch.testing.assert_close(transform(y, inverse=True), x)
    torch.testing.assert_close(transform(transform(x, inverse=True)), x)


@pytest.mark.parametrize("width", [1, 2, 16, 24, 56, 72, 152, 160, 576])
def test_the_fast_product_is_the_plain_one(width: int) -> None:
    h = hadamard(width, torch.float64)
    x = torch.randn(2, 3, width, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(transform(x), x @ h.T)
    torch.testing.assert_close(transform(x, inverse=True), x @ h)
    grad = torch.autograd.grad(transform(x).pow(3).sum(), x)[0]
    torch.testing.assert_close(grad, torch.autograd.grad((x @ h.T).pow(3).sum(), x)[0])


def test_the_first_kind_is_not_symmetric() -> None:
    assert not torch.equal(hadamard(12), hadamard(12).T)
    assert torch.equal(hadamard(64), hadamard(64).T)


@pytest.mark.parametrize("width", [0, 3, 6, 116, 156, 172, 188, 1000003])
def test_widths_without_a_matrix(width: int) -> None:
    """Some exist (116, 156, 172, 188 are known), but not by Paley's constructions."""
    assert not supported(width)
    with pytest.raises(ValueError, match=f"no Hadamard matrix of width {width} can be made"):
        transform(torch.zeros(2, width))


def test_a_base_first_seen_in_inference_serves_training() -> None:
    with torch.inference_mode():
        transform(torch.ones(1, 108))
    x = torch.ones(1, 108, requires_grad=True)
    transform(x).sum().backward()
    assert x.grad is not None


def test_signs_are_drawn_from_the_generator() -> None:
    a, b = (random_signs(1000, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(a, b)
    assert set(a.tolist()) == {-1.0, 1.0}
    assert abs(float(a.mean())) < 0.1
