"""SageAttention's formats against their definitions, and the four emulations against float attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from zoo.components.kernel.sage1 import Sage1
from zoo.components.kernel.sage2 import Sage2
from zoo.components.kernel.sage2pp import Sage2PP
from zoo.components.kernel.sage3 import Sage3
from zoo.components.ops import sage
from zoo.components.ops.attention import Scene, attention
from zoo.components.ops.sage import formats

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Run = Callable[[Scene], Tensor]
# (emulation, its spec, least cosine with float attention); the papers report 0.9998 and more for 8 bits on real activations
KINDS: dict[str, tuple[Run, float, float]] = {
    "sage1": (sage.sage1, Sage1.rounding, 0.9999),
    "sage2": (partial(sage.sage2, bits=8), Sage2(bits=8).rounding, 0.999),
    "sage2 int4": (partial(sage.sage2, bits=4), Sage2(bits=4).rounding, 0.98),
    "sage2pp": (partial(sage.sage2pp, bits=8), Sage2PP(bits=8).rounding, 0.999),
    "sage3": (sage.sage3, Sage3.rounding, 0.98),
}
every_kind = pytest.mark.parametrize("name", KINDS)


def scene(queries: int = 150, keys: int = 200, width: int = 64, outlier: float = 0.0) -> Scene:
    """Causal; ``outlier`` shifts channels of k by as much for all tokens, as real keys are shifted."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, r, n, width, generator=g) for r, n in ((2, queries), (1, keys), (1, keys)))
    k = k + outlier * torch.randn(1, 2, 1, 1, width, generator=g)
    keep = torch.arange(queries)[:, None] + keys - queries >= torch.arange(keys)
    return Scene(q, k, v, width**-0.5, keep[None, None, None])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.cosine_similarity(a.flatten(), b.flatten(), 0))


# ---- formats


def test_e2m1_rounds_to_the_nearest_code_and_ties_to_the_even_one() -> None:
    x = torch.arange(-512, 513) / 64  # every tie is on this grid
    far = (x.abs().clamp(max=6)[:, None] - FP4).abs()
    even = torch.arange(8) % 2 == 0
    best = torch.where(far == far.amin(1, keepdim=True), even.float() + 1, 0).argmax(1)
    assert torch.equal(formats.e2m1(x), FP4[best] * x.sign())


def test_e4m3_keeps_its_own_values_and_saturates() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()]
    assert torch.equal(formats.e4m3(codes), codes)
    assert torch.equal(formats.e4m3(torch.tensor([1e9, -500.0, 17.0])), torch.tensor([448.0, -448.0, 16.0]))


def test_fp22_cuts_to_thirteen_mantissa_bits() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    y = formats.fp22(x)
    assert (y.view(torch.int32) & 0x3FF == 0).all()
    assert ((x - y) * x.sign() >= 0).all()
    assert ((x - y).abs() < x.abs() * 2.0**-13 + 1e-30).all()


@pytest.mark.parametrize(
    ("layout", "own", "group"),
    [
        ((64,), (), lambda i: i // 64),  # one scale a tile
        ((4, 8), (1,), lambda i: (i // 32, i % 8)),  # queries of a thread
        ((8, 4, 2), (1,), lambda i: (i // 64, i % 8 // 2)),  # keys of a thread
    ],
    ids=["tile", "query thread", "key thread"],
)
@pytest.mark.parametrize("count", [64, 100])
def test_integers_share_scales_as_the_kernels_do(layout: tuple, own: tuple, group: Callable, count: int) -> None:
    x = torch.randn(2, count, 6, generator=torch.Generator().manual_seed(0)) * torch.rand(2, count, 1)
    coded = formats.integers(x, 127, layout, own)
    for row in range(2):
        for i in range(count):
            peers = [j for j in range(count) if group(j) == group(i)]
            scale = x[row, peers].abs().max() / 127
            torch.testing.assert_close(coded.scale[row, i, 0], scale)
            ratio = x[row, i] / scale
            assert torch.equal(coded.codes[row, i], torch.sign(ratio) * torch.floor(ratio.abs() + 0.5))
    assert coded.codes.abs().max() == 127


def test_microscaling_gives_sixteen_values_a_scale() -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    for row, group in [(0, slice(0, 16)), (1, slice(16, 32)), (2, slice(32, 40))]:
        scale = (x[row, group].abs().max() / 6).to(torch.float8_e4m3fn).float()
        torch.testing.assert_close(formats.microscaled(x)[row, group], formats.e2m1(x[row, group] / scale) * scale)
    assert torch.equal(formats.microscaled(torch.zeros(1, 16)), torch.zeros(1, 16))


@pytest.mark.parametrize("rounding", [formats.e4m3, formats.e2m1, formats.fp16, formats.fp22])
def test_gradients_pass_straight_through(rounding: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(20, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (3 * rounding(x)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((20,), 3.0))


# ---- attention


@every_kind
@pytest.mark.parametrize("outlier", [0.0, 10.0])
def test_near_to_float_attention(name: str, outlier: float) -> None:
    run, rounding, least = KINDS[name]
    s = scene(outlier=outlier)
    got, want = run(s), attention(s)
    assert cosine(got, want) > least
    assert 0 < (got - want).abs().max() / want.abs().max() < rounding


@every_kind
def test_a_shift_of_all_keys_does_not_matter(name: str) -> None:
    """Smoothing takes the mean of k out before anything is rounded; without it int4 and FP4 would lose every difference."""
    run, rounding, _ = KINDS[name]
    s = scene(queries=40, keys=40)
    shifted = replace(s, k=s.k + 30 * torch.randn(1, 2, 1, 1, 64, generator=torch.Generator().manual_seed(1)))
    want = attention(s)
    assert (run(shifted) - run(s)).abs().max() < rounding * want.abs().max()


@every_kind
def test_what_nobody_sees_moves_no_scale(name: str) -> None:
    run, s = KINDS[name][0], scene(queries=30, keys=50)
    hole = torch.ones(50, dtype=torch.bool)
    hole[40:] = False
    wild = replace(s, k=torch.where(hole[:, None], s.k, 1e4), v=torch.where(hole[:, None], s.v, 1e4), keep=s.keep & hole)
    short = replace(s, k=s.k[..., :40, :], v=s.v[..., :40, :], keep=s.keep[..., :40])
    torch.testing.assert_close(run(wild), run(short))
    blind = replace(s, keep=torch.zeros_like(s.keep))
    assert torch.equal(run(blind), torch.zeros_like(s.q))


def test_sage1_is_its_definition_on_one_tile() -> None:
    s = scene(queries=20, keys=20)
    k = s.k - s.k.mean(-2, keepdim=True)
    ints = [(x, x.abs().amax((-2, -1), keepdim=True) / 127) for x in (s.q, k)]
    (q8, dq), (k8, dk) = [(torch.sign(x) * torch.floor((x / d).abs() + 0.5), d) for x, d in ints]
    x = ((q8.long() @ k8.long().mT).float() * dq * dk * s.scale).masked_fill(~s.keep, -torch.inf)
    p = (x - x.amax(-1, keepdim=True)).exp()
    first = p[..., :16].half().float() @ s.v[..., :16, :].half().float()  # the fp16 accumulator is rounded every 16 keys
    o = (first.half().float() + p[..., 16:].half().float() @ s.v[..., 16:, :].half().float()).half().float()
    torch.testing.assert_close(sage.sage1(s), o / p.sum(-1, keepdim=True), rtol=1e-4, atol=1e-5)


def test_narrow_values_keep_fp16_sums_finite() -> None:
    """With v at the full 448 the sum of 64 products would pass 65504."""
    s = scene(queries=1, keys=64)
    s = replace(s, q=torch.zeros_like(s.q), v=torch.full_like(s.v, 3e4))
    torch.testing.assert_close(sage.sage2pp(s, 8), torch.full_like(s.q, 3e4), rtol=1e-3, atol=0)
    full = torch.full((1, 64), 448.0)
    assert formats.fp16(full @ torch.full((64, 1), 448.0)).isinf().all()
