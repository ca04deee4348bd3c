"""Codes of 4 bits in blocks: the tables, the bits of bitsandbytes, and the linear part."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from zoo.components.linear.bnb_4bit import BlockSize, BnB4Bit, BnB4BitLinear
from zoo.components.numerics import blockwise
from zoo.components.ops.block_matmul import BlockMatmul, choose
from zoo.components.spec import SpecError, check, dump, load

CPU = torch.device("cpu")
CODEBOOKS: tuple[blockwise.Codebook, ...] = get_args(blockwise.Codebook)
COMPILED = 2048  # block size from which the library compiles its dequantization on some CPUs, which takes seconds
SHAPES = [(64, 128), (7, 6), (33, 70), (1, 2)]
SPECS = [BnB4Bit(codebook=c, block_size=b, nested=n) for c, b, n in product(CODEBOOKS, (32, 64, 4096), (False, True))]
PRODUCTS = [p.name for p in zoo.parts("block_matmul")]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(spec: BnB4Bit, inputs: int = 96, outputs: int = 40, bias: bool = False) -> BnB4BitLinear:
    module = spec.build(inputs, outputs, bias)
    module.hold(spec.encode(random(outputs, inputs) / inputs**0.5))
    return module


def functional() -> Any:
    return pytest.importorskip("bitsandbytes").functional


# ---- numbers -----------------------------------------------------------------------------------------------------------------


def test_tables() -> None:
    nf4, fp4, dynamic = blockwise.codebook("nf4", CPU), blockwise.codebook("fp4", CPU), blockwise.dynamic(CPU)
    assert nf4.tolist() == sorted(nf4.tolist())
    assert (nf4[0], nf4[7], nf4[15]) == (-1, 0, 1)
    torch.testing.assert_close(fp4[:8] * 12, torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]))
    assert torch.equal(fp4[8:], -fp4[:8])
    assert len(dynamic.unique()) == 256
    assert (dynamic[127], dynamic[255]) == (0, 1)
    assert torch.equal(nf4, functional().get_4bit_type("nf4", "cpu"))
    assert torch.equal(fp4, functional().get_4bit_type("fp4", "cpu"))
    assert torch.equal(dynamic, functional().create_dynamic_map())


@pytest.mark.parametrize("name", CODEBOOKS)
@pytest.mark.parametrize("size", get_args(BlockSize))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_are_those_of_bitsandbytes(name: blockwise.Codebook, size: BlockSize, shape: tuple[int, int]) -> None:
    weight = random(*shape)
    theirs, state = functional().quantize_4bit(weight, blocksize=size, quant_type=name)
    packed, absmax = blockwise.encode(weight, name, size)
    assert torch.equal(packed, theirs.flatten())
    assert torch.equal(absmax, state.absmax)
    if size < COMPILED:
        ours = blockwise.decode(packed, absmax, name, size, weight.numel()).view(shape)
        assert torch.equal(ours, functional().dequantize_4bit(theirs, state).view(shape))


@pytest.mark.parametrize("name", CODEBOOKS)
def test_every_code_is_its_own_nearest(name: blockwise.Codebook) -> None:
    numbers = blockwise.codebook(name, CPU)
    packed, absmax = blockwise.encode(numbers.repeat(2, 2), name, 32)
    back = blockwise.decode(packed, absmax, name, 32, 64)
    assert torch.equal(back, numbers.repeat(4))


@pytest.mark.parametrize("name", CODEBOOKS)
def test_halves_take_the_lower_number_and_zeros_stay(name: blockwise.Codebook) -> None:
    numbers = blockwise.codebook(name, CPU).sort().values
    halves = (numbers[:-1] + numbers[1:]) / 2
    back = blockwise.decode(*blockwise.encode(torch.cat((torch.ones(1), halves)), name, 32), name, 32, 16)
    assert torch.equal(back[1:], numbers[:-1])
    zeros = blockwise.decode(*blockwise.encode(torch.zeros(5, 13), name, 32), name, 32, 65)
    assert torch.equal(zeros, torch.zeros(65))


def test_the_first_code_of_a_byte_is_in_its_high_half() -> None:
    packed, _ = blockwise.encode(torch.tensor([[-1.0, 1.0]]), "nf4", 32)
    assert packed.tolist() == [0x0F]


@pytest.mark.parametrize("count", [1, 3, 256, 300, 5000])
def test_scales_are_coded_to_the_nearest(count: int) -> None:
    absmax = random(count).abs() + 0.5
    codes, scales, offset = blockwise.encode_scales(absmax)
    assert scales.shape == (-(-count // 256),)
    _, state = functional().quantize_4bit(random(count, 64), blocksize=64, compress_statistics=True)
    theirs, outer = functional().quantize_blockwise(absmax - absmax.mean(), blocksize=256)
    assert torch.equal(offset[0], absmax.mean())
    if count > 1:  # less its mean a single scale is 0, which has no largest magnitude
        assert torch.equal(scales, outer.absmax)
        assert (codes.int() - theirs.int()).abs().max() <= 1
        assert (codes != theirs).float().mean() < 0.01
    ours = blockwise.decode_scales(codes, scales, offset)
    assert (ours - absmax).abs().max() <= 0.01 * (absmax - offset).abs().max() + 1e-6
    assert state.state2.blocksize == blockwise.NESTED


# ---- the linear part ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_spec_names_the_modules_tensors(spec: BnB4Bit, bias: bool) -> None:
    module, infos = quantized(spec, bias=bias), spec.tensors(96, 40, bias)
    for tensors in (module.state_dict(), module.canonical()):
        found = {n: (t.shape, t.dtype) for n, t in tensors.items()}
        assert {n: (i.shape, getattr(torch, i.dtype or "float32")) for n, i in infos.items()} == found
    assert load(type(spec), dump(spec)) == spec


@pytest.mark.parametrize(("name", "spec"), list(product(PRODUCTS, SPECS)), ids=str)
def test_products_are_those_of_the_dense_weight(name: str, spec: BnB4Bit) -> None:
    wanted = load(BlockMatmul, name)
    if reasons := wanted.refuses(quantized(spec).form, CPU, torch.float32):
        pytest.skip(f"{name} {reasons[0]}")
    module = quantized(replace(spec, matmul=wanted), bias=True)
    weight = module.dense_weight(torch.float64)
    for shape in ((1, 96), (2, 3, 96), (1, 1, 96), (2, 0, 96)):
        x = random(*shape, seed=1)
        exact = x.double() @ weight.T
        torch.testing.assert_close(module(x).double(), exact, rtol=1e-5, atol=1e-5)
        low = F.linear(x.bfloat16(), weight.bfloat16()).double()
        assert (module(x.bfloat16()).double() - exact).norm() <= 2 * (low - exact).norm()
    x = random(3, 96).requires_grad_()
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).float().expand(3, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_the_product_suits_the_dtype_of_the_inputs(codebook: blockwise.Codebook) -> None:
    """The library's operator for the CPU takes float64 and computes nonsense."""
    module, x = quantized(BnB4Bit(codebook=codebook)), random(5, 96).double()
    torch.testing.assert_close(module(x), x @ module.dense_weight(torch.float64).T)
    assert module.product(torch.float64).name == "reference"
    wide = copy.deepcopy(module).double()
    assert torch.equal(wide(x), module(x))
    pytest.importorskip("bitsandbytes")
    named = quantized(BnB4Bit(codebook=codebook, matmul=load(BlockMatmul, "bitsandbytes")))
    with pytest.raises(ValueError, match="bitsandbytes multiplies float32, bfloat16 and float16, not float64; leave matmul out"):
        named(x)
    assert torch.equal(named(x.float()), module(x.float()))


def test_compute_is_the_dtype_of_the_product() -> None:
    plain, low = quantized(BnB4Bit()), quantized(BnB4Bit(compute="bfloat16"))
    x = random(5, 96)
    assert torch.equal(low(x), plain(x.bfloat16()).float())
    assert low(x).dtype == torch.float32


def test_casts_and_copies_keep_codes_and_scales() -> None:
    module = quantized(BnB4Bit(nested=True), bias=True)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    after = copy.deepcopy(module).to(torch.bfloat16).state_dict()
    assert after.pop("bias").dtype == torch.bfloat16
    assert all(torch.equal(after[n], before[n]) and after[n].dtype == before[n].dtype for n in after)


def test_odd_counts() -> None:
    weight = random(5, 7)
    packed, absmax = blockwise.encode(weight, "nf4", 32)
    assert torch.equal(packed, functional().quantize_4bit(weight, blocksize=32, quant_type="nf4")[0].flatten())
    assert blockwise.decode(packed, absmax, "nf4", 32, 35).shape == (35,)


def test_mistakes_are_named() -> None:
    assert check(BnB4Bit(), 7, 8, False) == ["codebook: 7 inputs of 4 bits do not fill whole bytes, which bitsandbytes' products need"]
    with pytest.raises(SpecError, match="block_size"):
        load(BnB4Bit, {"block_size": 48})
    with pytest.raises(ValueError, match="bitsandbytes runs on cpu and cuda, not on xla"):
        choose(load(BlockMatmul, "bitsandbytes"), quantized(BnB4Bit()).form, torch.device("xla"), torch.float32)
    assert choose(None, quantized(BnB4Bit()).form, torch.device("xla"), torch.float32).name == "reference"
