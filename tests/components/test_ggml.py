"""Blocks of GGUF files against the decoder of the ``gguf`` library."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from zoo.components.numerics import floats, ggml
from zoo.components.numerics.floats import ELEMENTS


def decoded(blocks: Tensor, kind: Kind) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))


def draw(low: int, high: int, rows: int = 5, inputs: int = 96) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(low, high + 1, (rows, inputs), generator=generator, dtype=torch.int16)
    found[0, 0], found[0, 1] = low, high
    return found


def scales(rows: int = 5, blocks: int = 3) -> Tensor:
    return torch.randn(rows, blocks, generator=torch.Generator().manual_seed(1)).to(torch.float16)


def spread(scale: Tensor) -> Tensor:
    return scale.float().repeat_interleave(32, -1)


@pytest.mark.parametrize(("encode", "kind", "low", "high"), [
    (ggml.q4_0, Kind.Q4_0, -8, 7), (ggml.q5_0, Kind.Q5_0, -16, 15), (ggml.q8_0, Kind.Q8_0, -128, 127),
])  # fmt: skip
def test_levels_times_scale(encode: Callable[[Tensor, Tensor], Tensor], kind: Kind, low: int, high: int) -> None:
    levels, scale = draw(low, high), scales()
    assert torch.equal(decoded(encode(levels, scale), kind), levels.float() * spread(scale))


def test_codes_times_scale_plus_low() -> None:
    codes, scale = draw(0, 15), scales()
    low = (scale * -3).to(torch.float16)
    assert torch.equal(decoded(ggml.q4_1(codes, scale, low), Kind.Q4_1), codes.float() * spread(scale) + spread(low))


def test_mxfp4() -> None:
    codes = draw(0, 15).to(torch.uint8)
    scale = torch.tensor([[0, 1, 2], [126, 127, 128], [120, 130, 200], [3, 4, 5], [127, 127, 254]], dtype=torch.uint8)
    expected = floats.decode(codes, ELEMENTS["e2m1"]).double() * 2.0 ** (scale.double().repeat_interleave(32, -1) - 127)
    assert torch.equal(decoded(ggml.mxfp4(codes, scale), Kind.MXFP4), expected.float())


def test_a_golden_q4_0_block() -> None:
    """1.0 in float16 is 0x3c00; element j is in the low half of byte j, element j + 16 in the high one."""
    levels = torch.arange(32, dtype=torch.int16)[None] % 16 - 8
    levels[0, 16:] = 7 - levels[0, :16] - 8
    block = ggml.q4_0(levels, torch.ones(1, 1, dtype=torch.float16))[0].tolist()
    assert block == [0x00, 0x3C, *(j | (15 - j) << 4 for j in range(16))]


K_QUANTS = [(ggml.q4_k, Kind.Q4_K, 144), (ggml.q6_k, Kind.Q6_K, 210)]


@pytest.mark.parametrize(("encode", "kind", "size"), K_QUANTS)
def test_k_quants_return_what_they_hold(encode: Callable[[Tensor], Tensor], kind: Kind, size: int) -> None:
    """Weights that lie on a grid: of a whole step for Q6_K, of codes 0 to 15 for Q4_K, with every group's extremes there."""
    low, high = (0, 15) if kind == Kind.Q4_K else (-32, 31)
    weight = draw(low, high, 3, 512).float() * 0.25
    weight[:, ::16], weight[:, 1::16] = low * 0.25, high * 0.25
    blocks = encode(weight)
    assert blocks.shape == (3, 2 * size)
    torch.testing.assert_close(decoded(blocks, kind), weight, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("encode", "kind", "size"), K_QUANTS)
def test_k_quants_of_normal_weights(encode: Callable[[Tensor], Tensor], kind: Kind, size: int) -> None:
    """Less error than plain blocks of as many bits; rows do not depend on one another."""
    weight = torch.randn(40, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 40)[:, None]
    found = decoded(encode(weight), kind)
    error = (found - weight).norm(dim=1) / weight.norm(dim=1)
    assert error.max() < {Kind.Q4_K: 0.085, Kind.Q6_K: 0.021}[kind]
    assert torch.equal(decoded(encode(weight[7:9]), kind), found[7:9])
    if kind == Kind.Q4_K:
        plain = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), Kind.Q4_1), Kind.Q4_1))
        assert error.mean() < ((plain - weight).norm(dim=1) / weight.norm(dim=1)).mean()


@pytest.mark.parametrize(("encode", "kind", "size"), K_QUANTS)
def test_k_quants_of_zeros_and_of_one_sign(encode: Callable[[Tensor], Tensor], kind: Kind, size: int) -> None:
    weight = torch.zeros(4, 256)
    assert not decoded(encode(weight), kind).any()
    weight[1], weight[2], weight[3, 100] = 0.5, -0.5, 2.0
    torch.testing.assert_close(decoded(encode(weight), kind), weight, rtol=0.02, atol=1e-6)
    assert not decoded(encode(torch.full((1, 256), 1e-9)), kind).any()  # below what float16 scales hold
