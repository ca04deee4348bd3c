"""Integers of 8 bits: rounding, exact sums, W8A8 and LLM.int8."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from zoo.components.contracts import Linear
from zoo.components.linear.int8 import Int8, Int8Linear
from zoo.components.linear.llm_int8 import LLMInt8, LLMInt8Linear
from zoo.components.numerics import int8
from zoo.components.ops.int8_matmul import Int8Matmul, choose
from zoo.components.ops.outlier_matmul import OutlierMatmul
from zoo.components.spec import check, dump, load

CPU = torch.device("cpu")
INPUTS, OUTPUTS = 96, 40
SPECS: list[Linear] = [Int8(), Int8(inputs="tensor"), Int8(scale_dtype="bfloat16"), LLMInt8(), LLMInt8(threshold=0.0)]
EXACT = [p.name for p in zoo.parts("int8_matmul")]
OUTLIERS = [p.name for p in zoo.parts("outlier_matmul")]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(spec: Linear, bias: bool = False) -> Any:
    weight = random(OUTPUTS, INPUTS) / INPUTS**0.5
    module: Any = spec.build(INPUTS, OUTPUTS, bias)
    if isinstance(spec, LLMInt8):
        module.hold(dict(zip(("weight", "absmax"), int8.encode_absmax(weight), strict=True)))
        return module
    scale = int8.fit_rows(weight)
    held = {"weight": int8.quantize(weight, scale), "scale": scale.to(getattr(torch, str(getattr(spec, "scale_dtype", "float32"))))}
    module.hold(held | ({"input_scale": torch.tensor([0.02])} if "input_scale" in spec.own_tensors(2, 2, False) else {}))
    return module


# ---- numbers -----------------------------------------------------------------------------------------------------------------


def test_rounding_ties_saturation_and_nan() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 500.0, -128.5, -500.0, math.nan, 0.0]])
    assert int8.quantize(x, torch.ones(1, 1)).tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, -128, -128, 0, 0]]
    assert int8.fit_rows(torch.tensor([[3.0, -255.0], [0.0, 0.0]])).tolist() == [[2.0], [torch.finfo(torch.float32).tiny]]
    assert not int8.quantize(torch.zeros(2, 3), int8.fit_rows(torch.zeros(2, 3))).any()


def test_outliers_take_their_columns_out() -> None:
    x = torch.tensor([[1.0, 6.0, -2.0], [-4.0, 0.5, 1.0], [0.0, -7.0, 0.0]])
    codes, absmax, columns = int8.encode_tokens(x, 6.0)
    assert columns.tolist() == [1]
    assert absmax.tolist() == [2.0, 4.0, 0.0]
    assert codes.tolist() == [[64, 0, -127], [-127, 0, 32], [0, 0, 0]]
    assert int8.encode_tokens(x, 0.0)[2].tolist() == []


@pytest.mark.parametrize("threshold", [0.0, 1.5, 2.5, 6.0])
@pytest.mark.parametrize("tokens", [1, 17])
def test_codes_are_those_of_bitsandbytes(threshold: float, tokens: int) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    x = random(tokens, 64) * 2
    codes, absmax, columns = int8.encode_tokens(x, threshold)
    theirs, largest, outliers = functional.int8_vectorwise_quant(x.half(), threshold)
    assert torch.equal(codes, theirs)
    assert torch.equal(absmax, largest)
    assert columns.tolist() == ([] if outliers is None else outliers.tolist())
    assert torch.equal(int8.encode_absmax(x)[0], functional.int8_vectorwise_quant(x.half())[0])


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 1024, 16), (17, 1032, 24), (2, 5000, 8), (0, 16, 8)], ids=str)
def test_sums_are_exact(name: str, shape: tuple[int, int, int]) -> None:
    tokens, inputs, outputs = shape
    matmul = load(Int8Matmul, name)
    if matmul.refuses(inputs, outputs, CPU):
        pytest.skip(f"{name} {matmul.refuses(inputs, outputs, CPU)[0]}")
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-128, 128, (n, inputs), generator=draw).to(torch.int8) for n in (tokens, outputs))
    x[:1], weight[:1] = -128, -128  # the largest sum that there is
    found = matmul.product(x, weight)
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), x.long() @ weight.long().T)


def test_the_fastest_is_chosen() -> None:
    fast = torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert choose(None, 64, 64, CPU).name == ("torch_int_mm" if fast else "float32")
    assert choose(None, 64, 64, torch.device("cuda")).name == "torch_int_mm"
    assert choose(None, 63, 64, torch.device("cuda")).name == "reference"
    with pytest.raises(ValueError, match="int8_matmul float32 runs on the CPU only, not on cuda"):
        choose(load(Int8Matmul, "float32"), 64, 64, torch.device("cuda"))


# ---- the linear parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_spec_names_the_modules_tensors(spec: Linear, bias: bool) -> None:
    module, infos = quantized(spec, bias), spec.tensors(INPUTS, OUTPUTS, bias)
    for tensors in (module.state_dict(), module.canonical()):
        found = {n: (t.shape, t.dtype) for n, t in tensors.items()}
        assert {n: (i.shape, getattr(torch, i.dtype or "float32")) for n, i in infos.items()} == found
    assert load(Linear, dump(spec)) == spec


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_w8a8_is_the_product_of_rounded_numbers(name: str, spec: Int8) -> None:
    module: Int8Linear = quantized(spec)
    if load(Int8Matmul, name).refuses(INPUTS, OUTPUTS, CPU):
        pytest.skip(f"{name} does not run here")
    module.matmul = load(Int8Matmul, name)
    for shape in ((1, INPUTS), (2, 3, INPUTS), (2, 0, INPUTS)):
        x = random(*shape, seed=1)
        scale = x.abs().amax(-1, keepdim=True) / 127.5 if spec.inputs == "token" else torch.tensor([0.02])
        rounded = (x / scale).round().clamp(-128, 127).double() * scale.double()
        exact = F.linear(rounded, module.dense_weight(torch.float64))
        torch.testing.assert_close(module(x).double(), exact, rtol=2e-6, atol=1e-6)
        assert module(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", OUTLIERS)
@pytest.mark.parametrize("threshold", [0.0, 2.0, 6.0])
def test_llm_int8_keeps_outliers(name: str, threshold: float) -> None:
    module: LLMInt8Linear = quantized(LLMInt8(threshold=threshold))
    if load(OutlierMatmul, name).refuses(CPU):
        pytest.skip(f"{name} does not run here")
    module.matmul = load(OutlierMatmul, name)
    x = random(2, 7, INPUTS, seed=1)
    x[..., 5] *= 40
    exact = F.linear(x.double(), module.dense_weight(torch.float64))
    error = float((module(x).double() - exact).norm() / exact.norm())
    assert error < (0.002 if threshold else 0.05)
    assert error > 0.005 or threshold
    rows = x.flatten(0, 1)
    codes, absmax, columns = int8.encode_tokens(rows, threshold)
    weight = module.dense_weight(torch.float64)
    expected = (codes * absmax[:, None].double() / 127) @ weight.T + rows[:, columns].double() @ weight[:, columns].T
    torch.testing.assert_close(module(x).double().flatten(0, 1), expected, rtol=1e-4, atol=1e-4)
    assert module(x[:, :0]).shape == (2, 0, OUTPUTS)


def test_the_input_is_left_as_it_was() -> None:
    x = random(3, INPUTS).half() * 9
    before = x.clone()
    quantized(LLMInt8())(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gradients_pass_the_rounding(spec: Linear) -> None:
    module = quantized(spec)
    x = random(3, INPUTS).requires_grad_()
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, module.dense_weight(torch.float32).sum(0).expand(3, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_casts_and_copies_keep_codes_and_scales(spec: Linear) -> None:
    module = quantized(spec, bias=True)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    after = copy.deepcopy(module).to(torch.bfloat16).state_dict()
    assert after.pop("bias").dtype == torch.bfloat16
    assert all(torch.equal(after[n], before[n]) and after[n].dtype == before[n].dtype for n in after)


def test_mistakes_are_named() -> None:
    assert check(LLMInt8(threshold=-1.0), 8, 8, False) == ["threshold: must be 0 or above and finite, got -1.0"]
