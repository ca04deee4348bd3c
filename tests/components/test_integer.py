"""Integer grids and dense packing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zoo.components.numerics import integer
from zoo.components.numerics.integer import Grid

helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", reason="the oracle of the layout")

GROUPS = ((16, torch.bfloat16), (None, torch.float32))
GRIDS = [Grid(bits, group, symmetric, dtype) for bits in (2, 3, 4, 8) for symmetric in (True, False) for group, dtype in GROUPS]
Fit = Callable[[Tensor, Grid], tuple[Tensor, Tensor]]


def weight(rows: int = 12, columns: int = 48, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [1, 7, 8, 31, 32, 33, 37, 96])
def test_packing_is_that_of_compressed_tensors(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (5, count), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    signed = (codes.int() - 2 ** (bits - 1)).to(torch.int8)
    packed, rows = integer.pack(codes, bits), integer.pack_rows(codes.t(), bits)
    assert packed.shape == (5, integer.packed_size(count, bits))
    assert torch.equal(packed, helpers.pack_to_int32(signed, bits))
    assert torch.equal(rows, helpers.pack_to_int32(signed.t().contiguous(), bits, packed_dim=0))
    assert torch.equal(integer.unpack(packed, bits, count), codes)
    assert torch.equal(integer.unpack_rows(rows, bits, count), codes.t())


@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_is_one_little_endian_bitstream(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (64,), dtype=torch.uint8)
    stream = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    words = [(stream >> 32 * i) & 0xFFFFFFFF for i in range(2 * bits)]
    assert [word & 0xFFFFFFFF for word in integer.pack(codes, bits).tolist()] == words


def test_unpack_takes_rows_that_are_not_contiguous() -> None:
    codes = torch.randint(0, 8, (6, 64), dtype=torch.uint8)
    packed = integer.pack(codes, 3).t().contiguous().t()
    assert not packed.is_contiguous()
    assert torch.equal(integer.unpack(packed, 3, 64), codes)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("fit", [integer.fit, integer.fit_error])
def test_codes_agree_with_the_stored_scale(grid: Grid, fit: Fit) -> None:
    w = weight()
    scale, zero = fit(w, grid)
    assert scale.dtype == grid.scale_dtype
    assert zero.dtype == torch.uint8
    assert scale.shape == zero.shape == (12, grid.groups(48))
    codes = integer.quantize(w, scale, zero, grid.bits)
    step = scale.float().repeat_interleave(48 // scale.shape[1], 1)
    level = zero.float().repeat_interleave(48 // zero.shape[1], 1)
    every = (torch.arange(grid.top + 1) - level[..., None]) * step[..., None]
    least = (every - w[..., None]).abs().min(-1)
    rounded = integer.dequantize(codes, scale, zero, torch.float32)
    torch.testing.assert_close((rounded - w).abs(), least.values, rtol=1e-5, atol=1e-7)  # no code is nearer than the one chosen


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_range_is_covered(grid: Grid) -> None:
    """Within half a step, or one for the side of a symmetric grid that has a code less."""
    w = weight()
    scale, zero = integer.fit(w, grid)
    error = integer.dequantize(integer.quantize(w, scale, zero, grid.bits), scale, zero, torch.float32) - w
    steps = error.unflatten(-1, (scale.shape[1], -1)).abs() / scale.float()[..., None]
    assert steps.max() <= 0.5 + grid.top / 2**8 + 1e-3  # the scale's rounding moves the ends by up to top / 2 * 2^-8 steps


def test_dequantize_rounds_once() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None]
    scale = torch.tensor([[0.3]]).bfloat16()
    exact = (codes.double() - 128) * scale.double()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert torch.equal(integer.dequantize(codes, scale, 128, dtype), exact.to(dtype))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("fit", [integer.fit, integer.fit_error])
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-30])
def test_constant_groups_stay_finite_and_near(grid: Grid, fit: Fit, value: float) -> None:
    w = torch.full((3, 32), value)
    scale, zero = fit(w, grid)
    assert (scale > 0).all()
    rounded = integer.dequantize(integer.quantize(w, scale, zero, grid.bits), scale, zero, torch.float32)
    torch.testing.assert_close(rounded, w, rtol=0.5, atol=1e-33)  # a 2-bit symmetric grid ends at 2/3 of its range


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_search_finds_the_least_error_of_all_ranges(grid: Grid) -> None:
    w = weight(seed=1)

    def error(scale: Tensor, zero: Tensor) -> Tensor:
        rounded = integer.dequantize(integer.quantize(w, scale, zero, grid.bits), scale, zero, torch.float32)
        return (rounded - w).abs().pow(2.4).unflatten(-1, (scale.shape[1], -1)).sum(-1)

    low, high = integer._range(w, grid)
    every = torch.stack([error(*integer._spanning(low * (1 - i / 100), high * (1 - i / 100), grid)) for i in range(80)])
    found = error(*integer.fit_error(w, grid))
    assert (found <= error(*integer.fit(w, grid)) * 1.0001).all()
    assert found.sum() <= every.min(0).values.sum() * 1.03


def test_search_does_not_depend_on_how_it_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = GRIDS[0]
    whole = integer.fit_error(weight(), grid)
    monkeypatch.setattr(integer, "CHUNK", 100)
    assert all(map(torch.equal, integer.fit_error(weight(), grid), whole))
