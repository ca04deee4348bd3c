"""Few-bit floats against the published tables, torch's own and compressed-tensors' conversions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zoo.components.numerics import e8m0, floats
from zoo.components.numerics.amax_history import AmaxHistory
from zoo.components.numerics.e8m0 import Rule
from zoo.components.numerics.floats import ELEMENTS, Element

EVERY = list(ELEMENTS.values())
SMALL = [e for e in EVERY if e.dtype is None]


def finite(element: Element) -> Tensor:
    """Every finite number from 0 up, in order."""
    numbers = floats.decode(torch.arange(2 ** (element.bits - 1), dtype=torch.uint8), element)
    return numbers[numbers.isfinite()]


def test_tables_are_those_of_the_specification() -> None:
    """OCP Microscaling Formats 1.0, tables 3 to 5: least and greatest numbers, and E2M1 written out."""
    assert finite(ELEMENTS["e2m1"]).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    ends = {e.name: (finite(e)[1].item(), finite(e)[2**e.mantissa_bits].item(), finite(e)[-1].item(), len(finite(e))) for e in EVERY}
    assert ends == {
        "e2m1": (0.5, 1.0, 6.0, 8),
        "e2m3": (0.125, 1.0, 7.5, 32),
        "e3m2": (0.0625, 0.25, 28.0, 32),
        "e4m3": (2**-9, 2**-6, 448.0, 127),
        "e5m2": (2**-16, 2**-14, 57344.0, 124),
    }


@pytest.mark.parametrize("element", EVERY, ids=lambda e: e.name)
def test_fields_of_a_code_are_sign_exponent_and_mantissa(element: Element) -> None:
    for code, number in enumerate(finite(element).tolist()):
        exponent, mantissa = divmod(code, 2**element.mantissa_bits)
        bias = 2 ** (element.exponent_bits - 1) - 1
        share = mantissa / 2**element.mantissa_bits
        assert number == (math.ldexp(1 + share, exponent - bias) if exponent else math.ldexp(share, 1 - bias))
        negative = floats.decode(torch.tensor([code | 1 << (element.bits - 1)], dtype=torch.uint8), element)
        assert negative.item() == -number
        assert negative.signbit().item()


@pytest.mark.parametrize("element", EVERY, ids=lambda e: e.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_nearest_with_ties_to_even(element: Element, sign: int) -> None:
    table = finite(element)
    low, high = table[:-1], table[1:]
    middle = (low + high) / 2
    even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    below, above = torch.nextafter(middle, low), torch.nextafter(middle, high)
    for x, want in ((table, table), (middle, even), (below, low), (above, high)):
        assert torch.equal(floats.rounded(sign * x, element), sign * want)
        assert torch.equal(floats.decode(floats.encode(sign * x, element), element), sign * want)
        assert torch.equal(floats.rounded(sign * x, element).signbit(), (sign * x).signbit())


@pytest.mark.parametrize("element", EVERY, ids=lambda e: e.name)
def test_what_is_too_large_saturates_and_nan_stays(element: Element) -> None:
    x = torch.tensor([element.largest * 1.001, 1e30, torch.inf, -torch.inf, 1e-40, -0.0])
    want = torch.tensor([element.largest] * 3 + [-element.largest, 0.0, -0.0])
    for got in (floats.rounded(x, element), floats.decode(floats.encode(x, element), element)):
        assert torch.equal(got, want)
        assert torch.equal(got.signbit(), want.signbit())
    nan = torch.tensor([torch.nan])
    assert floats.rounded(nan, element).isnan()
    decoded = floats.decode(floats.encode(nan, element), element)
    assert decoded.isnan() if element.dtype else decoded.abs() == element.largest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_round_as_float32_does(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for element in EVERY:
        assert torch.equal(floats.rounded(x, element), floats.rounded(x.float(), element))
        assert torch.equal(floats.encode(x, element), floats.encode(x.float(), element))


def test_rounding_is_that_of_compressed_tensors() -> None:
    args = pytest.importorskip("compressed_tensors.quantization.quant_args")
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(floats.rounded(x, ELEMENTS["e2m1"]), args.FP4_E2M1_DATA.cast_to_fp4(x.clone().clamp(-6, 6)))
    assert torch.equal(floats.rounded(x, ELEMENTS["e2m3"]), args.FP6_E2M3_DATA.cast_to_fp6(x))


# ---- packing -----------------------------------------------------------------------------------------------------------------


def test_packing_by_hand() -> None:
    four = torch.tensor([[0x1, 0x2, 0x3, 0xF]], dtype=torch.uint8)
    assert floats.pack(four, ELEMENTS["e2m1"]).tolist() == [[0x21, 0xF3]]
    six = torch.tensor([[0b000001, 0b100000, 0b111111, 0b000010]], dtype=torch.uint8)
    word = 0b000010_111111_100000_000001
    assert floats.pack(six, ELEMENTS["e2m3"]).tolist() == [list(word.to_bytes(3, "little"))]


@pytest.mark.parametrize("element", EVERY, ids=lambda e: e.name)
@pytest.mark.parametrize("count", [4, 12, 32, 36])
@pytest.mark.parametrize("rows", [1, 3])
def test_unpacking_inverts_packing(element: Element, count: int, rows: int) -> None:
    codes = torch.randint(2**element.bits, (rows, count), generator=torch.Generator().manual_seed(count), dtype=torch.uint8)
    packed = floats.pack(codes, element)
    assert packed.shape == (rows, floats.packed_size(count, element))
    assert packed.dtype == torch.uint8
    assert torch.equal(floats.unpack(packed, element, count), codes)
    torch.testing.assert_close(floats.numbers(packed, element, count), floats.decode(codes, element), rtol=0, atol=0, equal_nan=True)


def test_packing_is_that_of_compressed_tensors() -> None:
    four = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    six = pytest.importorskip("compressed_tensors.compressors.mxfp6.helpers")
    generator = torch.Generator().manual_seed(0)
    for element, pack in ((ELEMENTS["e2m1"], four.pack_fp4_to_uint8), (ELEMENTS["e2m3"], six.pack_fp6_to_uint8)):
        codes = torch.randint(2**element.bits, (5, 64), generator=generator, dtype=torch.uint8)
        assert torch.equal(floats.pack(codes, element), pack(floats.decode(codes, element)))


# ---- powers of two as scales -------------------------------------------------------------------------------------------------


def test_every_power_of_two() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert e8m0.decode(codes)[:255].tolist() == [2.0 ** (u - 127) for u in range(255)]
    assert e8m0.decode(codes)[255].isnan()


@pytest.mark.parametrize(
    ("name", "largest", "floor", "round", "ceil"),
    [
        ("e2m1", 6.0, 0, 0, 0),
        ("e2m1", 6.5, 0, 0, 1),
        ("e2m1", 7.0, 0, 1, 1),  # the case in which compressed-tensors and OCP part
        ("e2m1", 8.0, 1, 1, 1),
        ("e2m1", 4.0, 0, 0, 0),
        ("e2m3", 7.5, 0, 0, 0),
        ("e2m3", 7.6, 0, 0, 1),
        ("e2m3", 7.75, 0, 1, 1),
        ("e3m2", 28.0, 0, 0, 0),
        ("e3m2", 30.0, 0, 1, 1),
        ("e4m3", 447.0, 0, 0, 0),
        ("e4m3", 448.0, 0, 1, 0),
        ("e4m3", 449.0, 0, 1, 1),
        ("e5m2", 57344.0, 0, 0, 0),
        ("e5m2", 60000.0, 0, 0, 1),
        ("e5m2", 61440.0, 0, 1, 1),
    ],
)
def test_rules_for_scales(name: floats.ElementName, largest: float, floor: int, round: int, ceil: int) -> None:
    rules: dict[Rule, int] = {"floor": floor, "round": round, "ceil": ceil}
    for shift in (-3, 0, 11):
        amax = torch.tensor([math.ldexp(largest, shift)])
        found = {rule: e8m0.encode(amax, ELEMENTS[name], rule).item() - 127 - shift for rule in rules}
        assert found == rules


@pytest.mark.parametrize("element", EVERY, ids=lambda e: e.name)
def test_with_ceil_nothing_saturates_and_no_less_would_do(element: Element) -> None:
    amax = torch.rand(500, generator=torch.Generator().manual_seed(0)) * 100 + 1e-3
    scale = e8m0.decode(e8m0.encode(amax, element, "ceil"))
    assert (amax / scale <= element.largest).all()
    assert (amax / (scale / 2) > element.largest).all()
    floor = e8m0.encode(amax, element, "floor")
    assert torch.equal(floor.int() - 127, amax.log2().floor().int() - element.top_exponent)


@pytest.mark.parametrize("rule", ["floor", "round", "ceil"])
def test_blocks_of_zeros_huge_tiny_and_broken_ones(rule: Rule) -> None:
    amax = torch.tensor([0.0, 3.4e38, 1e-44, torch.inf, torch.nan])
    low = e8m0.encode(amax, ELEMENTS["e2m1"], rule).tolist()
    assert low == [0, 252 + (rule != "floor"), 0, 254, 255]


def test_round_is_the_rule_of_compressed_tensors() -> None:
    mx = pytest.importorskip("compressed_tensors.quantization.utils.mxfp_utils")
    amax = torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 1000 + 1e-6
    for element in (ELEMENTS["e2m1"], ELEMENTS["e2m3"], ELEMENTS["e4m3"]):
        assert torch.equal(e8m0.encode(amax, element, "round").float(), mx.generate_mx_scales(amax, element.bits))


# ---- delayed scaling ---------------------------------------------------------------------------------------------------------


def test_delayed_scales_follow_the_largest_of_the_window() -> None:
    element, history = ELEMENTS["e4m3"], AmaxHistory.start(3)
    assert history.scale(element) == 1  # nothing seen yet
    scales = []
    for top in (448.0, 896.0, 1.0, 1.0, 1.0):
        history = history.after(torch.tensor([[0.5, -top], [0.0, 0.25]]))
        scales.append(history.scale(element).item() * 448)
    assert scales == pytest.approx([448.0, 896.0, 896.0, 896.0, 1.0])  # 896 leaves the window with the fifth step
    assert history.scale(element, margin=2).item() * 448 == pytest.approx(4.0)


def test_a_skipped_step_leaves_the_scale() -> None:
    history = AmaxHistory.start(2).after(torch.tensor([3.0], requires_grad=True))
    assert not history.window.requires_grad
    for broken in (torch.inf, torch.nan):
        assert history.after(torch.tensor([broken])).scale(ELEMENTS["e5m2"]) == history.scale(ELEMENTS["e5m2"])
    assert history.after(torch.zeros(4)).after(torch.zeros(4)).scale(ELEMENTS["e5m2"]) == 1
