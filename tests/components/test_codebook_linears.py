"""Linear parts of codebooks, rotated and not: the module against its dense weight, casts, moves and saved tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.components.contracts import Linear, StoredLinear
from zoo.components.linear.additive import Additive
from zoo.components.linear.e8p import E8P
from zoo.components.linear.mid_rise import MidRise
from zoo.components.linear.packed_int import PackedInt
from zoo.components.linear.rotated import Rotated
from zoo.components.numerics import e8, integer, mid_rise
from zoo.components.numerics.hadamard import hadamard
from zoo.components.spec import check, dump, load

INPUTS, OUTPUTS = 48, 40
PLAIN: list[Linear] = [
    *(E8P(bits=b) for b in (2, 3, 4)),
    *(MidRise(bits=b) for b in (2, 3, 4)),
    Additive(codebooks=2, bits=8),
    Additive(codebooks=1, bits=10, group=16),
    Additive(codebooks=3, bits=4, group=8, outputs_per_group=4),
]
SPECS = [*PLAIN, *(Rotated(inner=s) for s in PLAIN), Rotated(inner=PackedInt(group_size=16, symmetric=False))]


def filled(spec: Linear, bias: bool = False, seed: int = 0) -> StoredLinear:
    """A module with random codes, and other tensors near 1."""
    generator = torch.Generator().manual_seed(seed)
    module = spec.build(INPUTS, OUTPUTS, bias)
    assert isinstance(module, StoredLinear)
    drawn = {}
    for name, info in spec.tensors(INPUTS, OUTPUTS, False).items():
        kind = getattr(torch, info.dtype or "float32")
        if kind.is_floating_point:
            drawn[name] = torch.empty(info.shape).normal_(0 if "codebooks" in name else 1, 0.3, generator=generator).to(kind)
        else:
            top = 1 << getattr(spec, "bits", 8) if kind == torch.int16 else torch.iinfo(kind).max
            drawn[name] = torch.randint(0, top, info.shape, generator=generator).to(kind)
    module.hold(drawn)
    if bias:
        module.bias = torch.nn.Parameter(torch.linspace(-1, 1, OUTPUTS), requires_grad=False)
    return module


def relative(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_spec_names_the_modules_tensors(spec: Linear, bias: bool) -> None:
    assert not check(spec, INPUTS, OUTPUTS, bias)
    assert load(Linear, dump(spec)) == spec
    module, infos = filled(spec, bias), spec.tensors(INPUTS, OUTPUTS, bias)
    for tensors in (module.state_dict(), module.canonical()):
        found = {n: (t.shape, t.dtype) for n, t in tensors.items()}
        assert {n: (i.shape, getattr(torch, i.dtype or "float32")) for n, i in infos.items()} == found


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(1,), (2, 3), (5, 1), (1, 1), (2, 0)])
def test_the_product_is_that_of_the_dense_weight(spec: Linear, shape: tuple[int, ...]) -> None:
    module = filled(spec, bias=True)
    x = torch.randn(*shape, INPUTS, generator=torch.Generator().manual_seed(1))
    weight = module.dense_weight(torch.float64)
    assert module.bias is not None
    exact = x.double() @ weight.T + module.bias
    assert module(x).shape == exact.shape
    if exact.numel():
        low = relative(torch.nn.functional.linear(x.bfloat16(), weight.bfloat16(), module.bias.bfloat16()), exact)
        limit = 2 * low if "packed_int" in str(spec) else 2e-6  # whose product for single rows is in bfloat16
        assert relative(module(x), exact) < limit
        roundings = 3 if isinstance(spec, Rotated) else 2  # turned inputs and products are rounded too
        assert relative(module.bfloat16()(x.bfloat16()), exact) < roundings * low
        assert module(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_casts_keep_codes_and_scales(spec: Linear) -> None:
    module = filled(spec, bias=True)
    before = {n: t.clone() for n, t in module.canonical().items()}
    copied = copy.deepcopy(module).to(torch.bfloat16).half().double()
    for name, tensor in copied.canonical().items():
        assert tensor.dtype == (torch.float64 if name == "bias" else before[name].dtype)
        assert name == "bias" or torch.equal(tensor, before[name])
    again = spec.build(INPUTS, OUTPUTS, True)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(torch.ones(2, INPUTS)), module(torch.ones(2, INPUTS)))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("rows", [1, 4])
def test_gradients_reach_the_input(spec: Linear, rows: int) -> None:
    module = filled(spec)
    x = torch.randn(rows, INPUTS, requires_grad=True)
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, module.dense_weight().sum(0).expand(rows, -1), rtol=1e-4, atol=1e-4)


# ---- what each one means -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_e8p_holds_points(bits: Any) -> None:
    codes = e8.encode(torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(0)), bits)
    spec, scale = E8P(bits=bits), torch.tensor([0.3])
    module = spec.build(24, 6, False)
    module.hold(spec.encode(codes, scale))
    assert torch.equal(module.words().long(), codes)
    plain = e8.e8p(codes & 0xFFFF)
    if bits == 3:
        plain = plain + e8.e8_points(plain.device)[codes >> 16] / 2.04
    if bits == 4:
        plain = plain + e8.e8p(codes >> 16) / 3.45
    assert torch.equal(module.dense_weight(), plain.flatten(-2) * scale)


@pytest.mark.parametrize(("bits", "error"), [(2, 0.1189), (3, 0.0375), (4, 0.0116)])
def test_mid_rise_loses_on_normal_values_what_max_says(bits: Any, error: float) -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    step = mid_rise.STEPS[bits]
    rounded = mid_rise.decode(mid_rise.encode(x / step, bits), bits) * step
    assert 0.98 * error < (x - rounded).square().mean() < 1.01 * error


def test_mid_rise_values() -> None:
    codes = torch.arange(4, dtype=torch.uint8)
    assert mid_rise.decode(codes, 2).tolist() == [-1.5, -0.5, 0.5, 1.5]
    x = torch.tensor([-9, -1.01, -1, -0.01, 0, 0.99, 1, 9])
    assert mid_rise.encode(x, 2).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    spec = MidRise(bits=3)
    module = spec.build(5, 1, False)
    module.hold(spec.encode(torch.tensor([[7, 0, 3, 4, 5]], dtype=torch.uint8), torch.tensor([2.0])))
    assert module.dense_weight().tolist() == [[7, -7, -1, 1, 3]]
    assert integer.unpack(module.packed, 3, 5).tolist() == [[7, 0, 3, 4, 5]]


def test_a_rotation_is_that_of_its_matrices() -> None:
    module = filled(Rotated(inner=MidRise(bits=4)))
    assert isinstance(module.inner, StoredLinear)
    left, right = (hadamard(n, torch.float64) for n in (OUTPUTS, INPUTS))
    inner = module.inner.dense_weight(torch.float64)
    exact = module.output_signs.double()[:, None] * (left.T @ inner @ right) * module.input_signs.double()
    torch.testing.assert_close(module.dense_weight(torch.float64), exact)


def test_additive_sums_code_vectors() -> None:
    spec = Additive(codebooks=2, bits=3, group=4, outputs_per_group=2)
    module = spec.build(8, 4, False)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(8, (2, 2, 2), generator=generator)
    codebooks, scales = torch.randn(2, 8, 2, 4, generator=generator).half(), torch.randn(2, 1, 1, 1, generator=generator).half()
    module.hold({"codes": spec.stored(codes), "codebooks": codebooks, "scales": scales})
    assert module.codes.dtype == torch.int8
    assert module.codes.min() < 0  # two's complement of 3 bits
    for i in range(2):
        for j in range(2):
            block = scales[i, 0].float() * sum(codebooks[k, codes[i, j, k]].float() for k in range(2))
            torch.testing.assert_close(module.dense_weight()[2 * i : 2 * i + 2, 4 * j : 4 * j + 4], block[0] if block.dim() > 2 else block)


@pytest.mark.parametrize(
    ("spec", "sizes", "reason"),
    [
        (E8P(), (44, 40), "44 inputs do not divide into vectors of 8"),
        (Rotated(inner=MidRise()), (48, 172), "172 outputs have no Hadamard matrix"),
        (Rotated(inner=Rotated(inner=E8P())), (48, 40), "rotated gains nothing from a rotation"),
        (Rotated(inner=E8P()), (12, 40), "12 inputs do not divide"),
        (Additive(group=16), (40, 40), "40 inputs do not divide into groups of 16"),
        (Additive(outputs_per_group=16), (48, 40), "40 outputs do not divide into groups of 16"),
    ],
    ids=str,
)
def test_shapes_that_cannot_be_held(spec: Linear, sizes: tuple[int, int], reason: str) -> None:
    assert any(reason in line for line in check(spec, *sizes, False))
