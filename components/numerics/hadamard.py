"""Orthonormal Hadamard matrices, and their product with vectors in far fewer operations than a matrix takes.

A width n is cut into 2^k * base. The matrix of 2^k is Sylvester's, multiplied as k rounds of sums and differences; that of the base is
Paley's (1933), made from the squares of a finite field of q elements: order q + 1 where q leaves 3 after division by 4, and order
2 (q + 1) where it leaves 1. Where the smallest base has neither, a larger one with fewer rounds mostly does: 172 * 64 is 344 * 32.

Entries are +-n^-1/2, so H H^T = 1. Matrices of Paley's first kind are not symmetric, hence ``inverse``.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

LARGEST = 4096  # base: above it a product with the base's matrix costs more than it is worth


def supported(width: int) -> bool:
    """Whether there is a matrix of this width here."""
    return _base(width) is not None


def hadamard(width: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """The matrix H, [width, width]. Raises ValueError for widths that are not supported."""
    return transform(torch.eye(width, dtype=dtype, device=device)).t()


def transform(x: Tensor, *, inverse: bool = False) -> Tensor:
    """H x over the last dim, or H^T x for ``inverse``: [..., width] -> [..., width], computed in the dtype of x; differentiable.

    Raises ValueError for widths that are not supported.
    """
    width = x.shape[-1]
    base = _base(width)
    if base is None:
        raise ValueError(f"no Hadamard matrix of width {width} can be made; widths are 4 times a Paley order, or a power of two")
    matrix = signs_of(base, x.dtype, x.device)
    y = x.unflatten(-1, (width // base, base)) @ (matrix if inverse else matrix.t())
    return (_sylvester(y) * width**-0.5).flatten(-2)


def random_signs(width: int, generator: torch.Generator) -> Tensor:
    """[width] float32 of +1 and -1, on the generator's device."""
    return 1 - 2 * torch.randint(2, (width,), generator=generator, device=generator.device).float()


def _sylvester(x: Tensor) -> Tensor:
    """Multiply the last but one dim, a power of two, by Sylvester's matrix of +-1.

    Each round takes sums and differences by the index's lowest bit and makes it the highest; after all rounds the order is as before.
    """
    for _ in range(x.shape[-2].bit_length() - 1):
        even, odd = x.unflatten(-2, (-1, 2)).unbind(-2)
        x = torch.cat((even + odd, even - odd), -2)
    return x


# ---- bases -------------------------------------------------------------------------------------------------------------------


@cache
def _base(width: int) -> int | None:
    """The smallest order, 1 or Paley's, that makes up the width with a power of two."""
    if width < 1:
        return None
    odd = width // (width & -width)
    orders = (odd << k for k in range((width & -width).bit_length()))
    return next((n for n in orders if n <= LARGEST and (n == 1 or _field(n))), None)


@cache
def signs_of(order: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The matrix of a base, [order, order], its entries +-1. Kept; a normal tensor even where it is first asked for in inference."""
    with torch.inference_mode(False), torch.device("cpu"):
        return _paley(order).to(device, dtype)


def _field(order: int) -> tuple[int, int] | None:
    """(p, k) of the field of p^k elements that Paley's construction takes for an order; None where there is none."""
    if order % 4 == 0 and (found := _prime_power(order - 1)):
        return found
    half = order // 2 - 1
    return _prime_power(half) if order % 4 == 0 and half % 4 == 1 else None


def _prime_power(n: int) -> tuple[int, int] | None:
    """(p, k) with p^k = n and p an odd prime."""
    p = next((d for d in range(3, int(n**0.5) + 1, 2) if n % d == 0), n)
    k = next(k for k in range(n.bit_length()) if p ** (k + 1) > n)
    return (p, k) if n > 2 and n % 2 and p**k == n else None


def _paley(order: int) -> Tensor:
    """Constructions I and II (Paley 1933), [order, order] int8."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.int8)
    field = _field(order)
    assert field
    squares = _square_or_not(*field)
    border = torch.ones(1, len(squares), dtype=torch.int8)
    second = len(squares) % 4 == 1
    top = torch.cat((torch.zeros(1, 1, dtype=torch.int8), border), 1)
    core = torch.cat((top, torch.cat((border.t() if second else -border.t(), squares), 1)))
    one = torch.eye(len(core), dtype=torch.int8)
    if not second:
        return one + core
    return torch.kron(core, torch.tensor([[1, 1], [1, -1]])).to(torch.int8) + torch.kron(one, torch.tensor([[1, -1], [-1, -1]])).to(
        torch.int8
    )


def _square_or_not(p: int, k: int) -> Tensor:
    """[q, q] int8 for q = p^k: +1 where a - b is a square other than 0, -1 where it is none, 0 where a = b."""
    elements = torch.cartesian_prod(*[torch.arange(p)] * k).view(-1, k)  # coefficients of polynomials, lowest degree last
    places = p ** torch.arange(k - 1, -1, -1)
    squares = _squares(elements, places, p)
    kind = torch.full((p**k,), -1, dtype=torch.int8)
    kind[squares] = 1
    kind[0] = 0
    return kind[((elements[:, None] - elements) % p * places).sum(-1)]


def _squares(elements: Tensor, places: Tensor, p: int) -> Tensor:
    """Numbers of the elements that are squares.

    Products are taken modulo a polynomial x^k - r(x). The ring is a field just where (q + 1) / 2 elements are squares.
    """
    for rest in elements:
        squares = (_product(elements, elements, rest, p) * places).sum(-1).unique()
        if len(squares) == (len(elements) + 1) // 2:
            return squares
    raise AssertionError(f"no irreducible polynomial of degree {len(places)} modulo {p}")


def _product(a: Tensor, b: Tensor, rest: Tensor, p: int) -> Tensor:
    """Products modulo x^k - rest(x) and modulo p, [..., k]: Horner's rule over the coefficients of b."""
    total = torch.zeros_like(a)
    for i in range(a.shape[-1]):
        carried = total.roll(-1, -1)
        carried[..., -1] = 0
        total = (carried + total[..., :1] * rest + a * b[..., i : i + 1]) % p
    return total
