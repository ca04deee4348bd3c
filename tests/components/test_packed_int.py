"""The packed linear part, over every product that the registry knows."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

import zoo
from zoo.components.contracts import Linear
from zoo.components.linear.packed_int import PackedInt, PackedLinear
from zoo.components.numerics import integer
from zoo.components.ops.packed_matmul import PackedMatmul, choose
from zoo.components.spec import SpecError, check, dump, load

CPU = torch.device("cpu")
FORMS = [PackedInt(bits=b, group_size=g, symmetric=s) for b, g, s in product((2, 3, 4, 5, 8), (None, 32, 64), (True, False))]
SIZES = (128, 64)  # inputs, outputs: every product takes them for some form


def quantized(spec: PackedInt, inputs: int = SIZES[0], outputs: int = SIZES[1], bias: bool = False) -> tuple[PackedLinear, Tensor]:
    """A module and its weight as float64."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) / inputs**0.5
    scale, zero = integer.fit(weight, spec.grid)
    codes = integer.quantize(weight, scale, zero, spec.bits)
    module = spec.build(inputs, outputs, bias)
    if bias:
        module.bias = torch.nn.Parameter(torch.linspace(-1, 1, outputs), requires_grad=False)
    module.hold(spec.encode(codes, scale, zero))
    return module, integer.dequantize(codes, scale, zero, torch.float64)


def with_matmul(spec: PackedInt, name: str) -> PackedInt:
    return replace(spec, matmul=load(PackedMatmul, name))


def accepted(name: str, spec: PackedInt) -> bool:
    return not load(PackedMatmul, name).refuses(spec.build(*SIZES, False).form, CPU)


NAMES = [p.name for p in zoo.parts("packed_matmul")]
CASES = [(name, spec) for name in NAMES for spec in FORMS if accepted(name, spec)]
ONE_EACH = list({name: (name, spec) for name, spec in CASES}.values())


def relative(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def tolerance(exact: Tensor, x: Tensor, weight: Tensor) -> float:
    """Twice the error of torch's own bfloat16 product."""
    return 2 * relative(torch.nn.functional.linear(x.bfloat16(), weight.bfloat16()), exact)


@pytest.mark.parametrize("spec", FORMS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_spec_names_the_modules_tensors(spec: PackedInt, bias: bool) -> None:
    inputs, outputs = 96 if spec.group_size == 32 else 64, 40
    built, filled = spec.build(inputs, outputs, bias), quantized(spec, inputs, outputs, bias)[0]
    for module in (built, filled):
        infos = spec.tensors(inputs, outputs, bias)
        state = module.state_dict()
        assert {n: (i.shape, getattr(torch, i.dtype or "float32")) for n, i in infos.items()} == {
            n: (t.shape, t.dtype) for n, t in state.items()
        }


@pytest.mark.parametrize(("name", "spec"), CASES, ids=str)
def test_every_layout_holds_the_same_weight(name: str, spec: PackedInt) -> None:
    module, weight = quantized(with_matmul(spec, name))
    plain = quantized(with_matmul(spec, "reference"))[0]
    assert module.matmul.name == name
    canonical = module.canonical()
    assert canonical.keys() == plain.canonical().keys()
    for key, tensor in plain.canonical().items():
        assert torch.equal(canonical[key], tensor), key
        assert canonical[key].dtype == tensor.dtype
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(module.dense_weight(dtype), plain.dense_weight(dtype))
        assert torch.equal(module.dense_weight(dtype).double(), weight.to(dtype).double())


@pytest.mark.parametrize(("name", "spec"), CASES, ids=str)
def test_every_product_is_near_float64(name: str, spec: PackedInt) -> None:
    module, weight = quantized(with_matmul(spec, name))
    for shape in ((1, 128), (17, 128), (1, 1, 128), (5, 1, 128), (2, 3, 128)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        exact = x.double() @ weight.T
        assert relative(module(x), exact) <= tolerance(exact, x, weight)
        assert module(x).dtype == torch.float32
        low = module(x.bfloat16())
        assert low.dtype == torch.bfloat16
        assert relative(low, exact) <= 1.5 * tolerance(exact, x, weight)


@pytest.mark.parametrize(("name", "spec"), ONE_EACH, ids=str)
def test_many_rows_are_multiplied_in_float32(name: str, spec: PackedInt) -> None:
    module, weight = quantized(with_matmul(spec, name))
    x = torch.randn(2, 5, 128)
    assert relative(module(x), x.double() @ weight.T) < 1e-6


@pytest.mark.parametrize(("name", "spec"), ONE_EACH, ids=str)
def test_a_row_does_not_depend_on_its_batch(name: str, spec: PackedInt) -> None:
    module, _ = quantized(with_matmul(spec, name))
    x = torch.randn(20, 1, 128)
    torch.testing.assert_close(module(x)[:3], torch.cat([module(row[None]) for row in x[:3]]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "spec"), ONE_EACH, ids=str)
def test_strided_and_empty_inputs(name: str, spec: PackedInt) -> None:
    module, _ = quantized(with_matmul(spec, name), bias=True)
    wide = torch.randn(2, 256)
    assert torch.equal(module(wide[:, ::2]), module(wide[:, ::2].contiguous()))
    assert torch.equal(module(wide[:, :128].bfloat16()), module(wide[:, :128].bfloat16().contiguous()))
    assert module(torch.randn(2, 0, 128)).shape == (2, 0, 64)


@pytest.mark.parametrize(("name", "spec"), ONE_EACH, ids=str)
def test_gradients_reach_the_input(name: str, spec: PackedInt) -> None:
    module, weight = quantized(with_matmul(spec, name))
    x = torch.randn(2, 128, requires_grad=True)
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).float().expand(2, -1), rtol=1e-5, atol=1e-5)


def test_the_fastest_that_keeps_the_size_is_chosen() -> None:
    chosen = {}
    for spec in FORMS:
        chosen[spec.bits, spec.group_size, spec.symmetric] = quantized(spec)[0].matmul.name
    assert chosen[4, 32, True] == chosen[4, 64, False] == "torch_int4"
    assert chosen[8, None, True] == "torch_int8"
    assert {chosen[b, g, s] for b in (2, 3) for g in (None, 32) for s in (True, False)} == {"reference"}
    assert all(choose(None, spec.build(*SIZES, False).form, torch.device("cuda")).name == "reference" for spec in FORMS)


@pytest.mark.parametrize(
    "spec", [PackedInt(group_size=32), PackedInt(group_size=64, symmetric=False), PackedInt(bits=8), PackedInt(bits=3)], ids=str
)
def test_memory_is_what_the_spec_says(spec: PackedInt) -> None:
    module, _ = quantized(spec)
    said = sum(torch.Size(i.shape).numel() * getattr(torch, i.dtype or "float32").itemsize for i in spec.tensors(*SIZES, False).values())
    held = sum(b.nbytes for b in module.buffers())
    extra = 2 * 64 * 128 // spec.group_size if spec.group_size else 0  # the operator's offsets
    assert held <= said + extra


def test_product_with_bias() -> None:
    module, weight = quantized(PackedInt(group_size=32), bias=True)
    x = torch.randn(40, 128)
    torch.testing.assert_close(module(x), (x.double() @ weight.T + torch.linspace(-1, 1, 64)).float(), rtol=1e-5, atol=1e-5)


def test_casts_and_copies_keep_codes_and_scales() -> None:
    module, _ = quantized(PackedInt(bits=8), bias=True)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    cast = copy.deepcopy(module).to(torch.bfloat16)
    after = cast.state_dict()
    assert after.pop("bias").dtype == torch.bfloat16
    assert all(torch.equal(after[n], before[n]) and after[n].dtype == before[n].dtype for n in after)
    assert cast.matmul.name == "torch_int8"
    assert cast(torch.randn(1, 128).bfloat16()).dtype == torch.bfloat16


def test_a_state_dict_loads_into_a_module_in_use() -> None:
    module, _ = quantized(PackedInt(group_size=32))
    other, weight = quantized(PackedInt(group_size=32))
    other.hold({n: t * 0 for n, t in other.canonical().items()})
    assert not other.dense_weight().any()
    other.load_state_dict(module.state_dict())
    assert other.matmul.name == "torch_int4"
    assert torch.equal(other.dense_weight(torch.float64), weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})


def test_meta_modules_materialize() -> None:
    with torch.device("meta"):
        module = PackedInt(group_size=32).build(128, 64, True)
    module.prepare()
    assert all(t.is_meta for t in module.state_dict().values())
    module.to_empty(device="cpu")
    filled, weight = quantized(PackedInt(group_size=32), bias=True)
    module.load_state_dict(filled.state_dict())
    assert torch.equal(module.dense_weight(torch.float64), weight)


def test_mistakes_are_named() -> None:
    assert check(PackedInt(group_size=48), 128, 64, False) == ["group_size: 128 inputs do not divide into groups of 48"]
    assert check(PackedInt(group_size=0), 128, 64, False)
    with pytest.raises(SpecError, match="bits"):
        load(Linear, {"name": "packed_int", "bits": 9})
    with pytest.raises(SpecError, match="no packed_matmul named 'torch_int5'"):
        load(Linear, {"name": "packed_int", "matmul": "torch_int5"})
    with pytest.raises(ValueError, match="torch_int8 needs one scale per output, not groups of 32"):
        quantized(load(PackedInt, {"group_size": 32, "matmul": "torch_int8"}))


def test_specs_survive_dumping() -> None:
    for spec in FORMS:
        for matmul in (None, *(load(PackedMatmul, name) for name in NAMES)):
            full = PackedInt(bits=spec.bits, group_size=spec.group_size, symmetric=spec.symmetric, scale_dtype="float16", matmul=matmul)
            assert load(Linear, dump(full)) == full
