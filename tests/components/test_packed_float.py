"""The part ``packed_float`` over every product that the registry knows, with compressed-tensors and plain formulas beside it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from zoo.components.contracts import Linear
from zoo.components.linear.packed_float import FloatInputs, FloatLinear, PackedFloat
from zoo.components.numerics import floats, scaled
from zoo.components.numerics.floats import ELEMENTS
from zoo.components.numerics.scaled import Grid
from zoo.components.ops.float_matmul import FloatMatmul, choose
from zoo.components.spec import SpecError, check, dump, load

CPU = torch.device("cpu")
SIZES = (128, 64)  # inputs, outputs
TOKEN = FloatInputs()
FIXED = FloatInputs(scale=None, tensor_scale="multiplier")
MX8, MX4 = (FloatInputs(element=e, group_size=32, scale="e8m0") for e in ("e4m3", "e2m1"))
NV = FloatInputs(element="e2m1", group_size=16, scale="e4m3", tensor_scale="divisor")
SPECS = {
    "fp8 tensor": PackedFloat(group_outputs=None, inputs=FIXED),
    "fp8 channel": PackedFloat(),
    "fp8 channel, token": PackedFloat(inputs=TOKEN),
    "fp8 channel in bfloat16": PackedFloat(scale="bfloat16", inputs=TOKEN),
    "e5m2 channel, token": PackedFloat(element="e5m2", inputs=TOKEN),
    "fp8 block": PackedFloat(group_outputs=48, group_size=48, inputs=FloatInputs(group_size=48)),
    "fp8 block of powers": PackedFloat(group_outputs=48, group_size=48, scale="e8m0"),
    "fp6 channel": PackedFloat(element="e3m2", scale="float16"),
    "mxfp8": PackedFloat(group_size=32, scale="e8m0", inputs=MX8),
    "mxfp6": PackedFloat(element="e2m3", group_size=32, scale="e8m0"),
    "mxfp4": PackedFloat(element="e2m1", group_size=32, scale="e8m0", inputs=MX4),
    "nvfp4": PackedFloat(element="e2m1", group_size=16, scale="e4m3", tensor_scale="divisor", inputs=NV),
    "nvfp4 multiplied": PackedFloat(element="e2m1", group_size=16, scale="e4m3", tensor_scale="multiplier",
                                    inputs=replace(NV, tensor_scale="multiplier")),
}  # fmt: skip
NAMES = [p.name for p in zoo.parts("float_matmul")]
INPUT_SCALE = {"divisor": 64.0, "multiplier": 1 / 64}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(spec: PackedFloat, inputs: int = SIZES[0], outputs: int = SIZES[1], bias: bool = False) -> tuple[FloatLinear, Tensor]:
    """A module and its weight as float64, by the formulas written out."""
    weight, grid = draw(outputs, inputs) / inputs**0.5, spec.grid
    tensor = scaled.fit_tensor(weight.abs().max(), grid) if spec.tensor_scale else None
    scale = scaled.fit(weight, grid, tensor)
    held = spec.encode(weight, scale, tensor)
    if spec.inputs and spec.inputs.tensor_scale:
        held[f"input_{spec.inputs.tensor_scale}"] = torch.tensor([INPUT_SCALE[spec.inputs.tensor_scale]])
    module = spec.build(inputs, outputs, bias)
    if bias:
        module.bias = torch.nn.Parameter(torch.linspace(-1, 1, outputs), requires_grad=False)
    module.hold(held)
    codes = floats.unpack(held["packed"], grid.element, inputs)
    factor = scaled.effective(scale, tensor, grid)
    rows = torch.arange(outputs)[:, None] // (grid.rows or outputs)
    columns = torch.arange(inputs) // (grid.columns or inputs)
    return module, floats.decode(codes, grid.element).double() * factor[rows, columns].double()


def with_matmul(spec: PackedFloat, name: str) -> PackedFloat:
    return replace(spec, matmul=load(FloatMatmul, name))


CASES = [(n, k) for n in NAMES for k, s in SPECS.items() if not load(FloatMatmul, n).refuses(s.build(*SIZES, False).form, CPU)]


def rounded_inputs(spec: PackedFloat, x: Tensor) -> Tensor:
    """Inputs as the product must see them, one token after the other."""
    if spec.inputs is None:
        return x
    kind = spec.inputs.tensor_scale
    tensor = torch.tensor([INPUT_SCALE[kind]]) if kind else None
    rows = [scaled.rounded_tokens(row[None], spec.inputs.grid, tensor) for row in x.reshape(-1, x.shape[-1])]
    return torch.cat(rows).view(x.shape)


def relative(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


# ---- what is stored ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_spec_names_the_modules_tensors(name: str, bias: bool) -> None:
    spec, (inputs, outputs) = SPECS[name], (96, 40)
    for module in (spec.build(inputs, outputs, bias), quantized(spec, inputs, outputs, bias)[0]):
        infos, state = spec.tensors(inputs, outputs, bias), module.state_dict()
        assert {n: (i.shape, getattr(torch, i.dtype or "float32")) for n, i in infos.items()} == {
            n: (t.shape, t.dtype) for n, t in state.items()
        }
        assert list(module.canonical()) == list(infos)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sizes", [SIZES, (96, 40)])
def test_the_weight_is_number_times_scale(name: str, sizes: tuple[int, int]) -> None:
    module, weight = quantized(SPECS[name], *sizes)
    assert torch.equal(module.dense_weight(torch.float32).double(), weight.float().double())
    assert torch.equal(module.dense_weight(torch.bfloat16), module.dense_weight(torch.float32).bfloat16())
    assert module.dense_weight().dtype == torch.float32


@pytest.mark.parametrize("name", SPECS)
def test_every_weight_is_at_its_nearest_point(name: str) -> None:
    module, weight = quantized(SPECS[name])
    source, grid = draw(*SIZES[::-1]) / SIZES[0] ** 0.5, module.form.grid
    every = floats.decode(torch.arange(2**grid.element.bits, dtype=torch.uint8), grid.element)
    every = every[every.isfinite()].double()
    held = module.held
    tensor = held.get("divisor", held.get("multiplier"))
    factor = scaled.effective(held["scale"], tensor, grid)
    rows, columns = torch.arange(SIZES[1])[:, None] // (grid.rows or SIZES[1]), torch.arange(SIZES[0]) // (grid.columns or SIZES[0])
    points = every * factor[rows, columns].double()[..., None]
    least = (points - source.double()[..., None]).abs().amin(-1)
    assert ((weight - source).abs() <= least * (1 + 1e-6) + 1e-12).all()


def test_bits_per_weight_are_those_published() -> None:
    bits = {}
    for name in ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8 channel"):
        infos = replace(SPECS[name], inputs=None).own_tensors(4096, 4096, False)
        bits[name] = 8 * sum(i.bytes(4) for i in infos.values()) / 4096**2
    assert bits == pytest.approx({"nvfp4": 4.5, "mxfp4": 4.25, "mxfp6": 6.25, "mxfp8": 8.25, "fp8 channel": 8.0}, abs=0.01)
    block = PackedFloat(group_outputs=128, group_size=128).own_tensors(4096, 4096, False)
    assert 8 * sum(i.bytes(4) for i in block.values()) / 4096**2 == pytest.approx(8.002, abs=1e-3)


def test_blocks_of_zeros_and_tiny_ones_stay_finite() -> None:
    for spec in SPECS.values():
        weight = draw(64, 128)
        weight[:48, :48] = 0
        weight[63] = 1e-30
        tensor = scaled.fit_tensor(weight.abs().max(), spec.grid) if spec.tensor_scale else None
        module = replace(spec, inputs=None).build(128, 64, False)
        module.hold(replace(spec, inputs=None).encode(weight, scaled.fit(weight, spec.grid, tensor), tensor))
        dense = module.dense_weight()
        assert dense.isfinite().all()
        assert not dense[:48, :48].any()


def test_a_tensor_of_zeros_has_the_tensor_scale_1() -> None:
    for kind in ("divisor", "multiplier"):
        grid = Grid(ELEMENTS["e2m1"], 1, 16, "e4m3", kind)
        assert scaled.fit_tensor(torch.tensor(0.0), grid).item() == 1
        assert scaled.fit_tensor(torch.tensor(torch.nan), grid).item() == 1


# ---- compressed-tensors ------------------------------------------------------------------------------------------------------

PRESETS: dict[str, tuple[str, Any]] = {
    "FP8_DYNAMIC": ("fp8 channel, token", None),
    "MXFP4": ("mxfp4", None),
    "MXFP6A16": ("mxfp6", None),
    "MXFP8": ("mxfp8", None),
    "NVFP4": ("nvfp4", 64.0),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_inputs_are_rounded_as_by_compressed_tensors(preset: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    name, divisor = PRESETS[preset]
    args, spec = preset_name_to_scheme(preset, ["Linear"]).input_activations, SPECS[name]
    if args is None:
        assert spec.inputs is None
        return
    x = draw(2, 5, 128) * torch.logspace(-1, 1, 5)[:, None]
    tensor = torch.tensor([divisor]) if divisor else None
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(1, 1), global_scale=tensor)
    assert spec.inputs is not None
    assert torch.equal(scaled.rounded_tokens(x, spec.inputs.grid, tensor), fake_quantize(x, scale, zero, args, tensor))


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_rounded_as_by_compressed_tensors(preset: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, spec = preset_name_to_scheme(preset, ["Linear"]).weights, SPECS[PRESETS[preset][0]]
    module, _ = quantized(spec)
    weight = draw(*SIZES[::-1]) / SIZES[0] ** 0.5
    blocks = weight.unflatten(-1, (-1, args.group_size or 128))
    tensor = generate_gparam(weight.min(), weight.max()) if spec.tensor_scale else None
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=tensor)
    assert torch.equal(module.dense_weight(), fake_quantize(weight, scale, None, args, tensor))


# ---- products ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("matmul", "name"), CASES)
@pytest.mark.parametrize("shape", [(1, 128), (17, 128), (5, 1, 128), (2, 3, 128), (2, 0, 128)])
def test_every_product_is_that_of_the_rounded_inputs(matmul: str, name: str, shape: tuple[int, ...]) -> None:
    spec = with_matmul(SPECS[name], matmul)
    module, weight = quantized(spec, bias=True)
    assert module.matmul.name == matmul
    x = draw(*shape, seed=1)
    y = module(x)
    assert y.shape == (*shape[:-1], 64)
    if y.numel():
        exact = rounded_inputs(spec, x).double() @ weight.T + torch.linspace(-1, 1, 64)
        assert relative(y, exact) < 1e-6


@pytest.mark.parametrize(("matmul", "name"), CASES)
def test_low_precision_inputs(matmul: str, name: str) -> None:
    spec = with_matmul(SPECS[name], matmul)
    module, weight = quantized(spec)
    x = draw(7, 128, seed=1).bfloat16()
    exact = rounded_inputs(spec, x).double() @ weight.T
    low = torch.nn.functional.linear(rounded_inputs(spec, x).bfloat16(), weight.bfloat16())
    assert module(x).dtype == torch.bfloat16
    assert relative(module(x), exact) <= 2 * relative(low, exact)


@pytest.mark.parametrize(("matmul", "name"), CASES)
def test_a_row_does_not_depend_on_its_batch(matmul: str, name: str) -> None:
    module, _ = quantized(with_matmul(SPECS[name], matmul))
    x = draw(20, 1, 128)
    torch.testing.assert_close(module(x)[:3], torch.cat([module(row[None]) for row in x[:3]]), rtol=1e-5, atol=1e-5)
    wide = draw(2, 256)
    assert torch.equal(module(wide[:, ::2]), module(wide[:, ::2].contiguous()))


@pytest.mark.parametrize(("matmul", "name"), CASES)
def test_gradients_pass_straight_through_the_rounding(matmul: str, name: str) -> None:
    spec = with_matmul(SPECS[name], matmul)
    module, weight = quantized(spec)
    x = draw(2, 128, seed=1).requires_grad_()
    y = module(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).float().expand(2, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.detach(), module(x.detach()), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [k for n, k in CASES if n == "scaled_mm"])
def test_the_product_of_the_gpu_is_that_of_the_reference(name: str) -> None:
    module, weight = quantized(SPECS[name])
    x = draw(7, 128, seed=1)
    exact = rounded_inputs(SPECS[name], x).double() @ weight.T
    moved = module.to("cuda")
    assert moved.matmul.name == "scaled_mm"
    assert relative(moved(x.to("cuda")).cpu(), exact) < 2**-8


def test_the_fastest_that_accepts_is_chosen() -> None:
    chosen = {name: quantized(spec)[0].matmul.name for name, spec in SPECS.items()}
    by_torch = {"fp8 tensor", "fp8 channel, token", "fp8 channel in bfloat16"}
    assert {name for name, matmul in chosen.items() if matmul == "scaled_mm"} == by_torch
    odd = PackedFloat(inputs=TOKEN).build(128, 40, False).form
    assert choose(None, odd, torch.device("cuda")).name == "reference"  # the GPU's operator takes multiples of 16


# ---- the module --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_casts_and_copies_keep_codes_and_scales(name: str) -> None:
    module, _ = quantized(SPECS[name], bias=True)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    after = copy.deepcopy(module).to(torch.bfloat16).state_dict()
    assert after.pop("bias").dtype == torch.bfloat16
    assert all(torch.equal(after[n], before[n]) and after[n].dtype == before[n].dtype for n in after)


def test_a_state_dict_loads_and_meta_modules_materialize() -> None:
    with torch.device("meta"):
        module = SPECS["nvfp4"].build(128, 64, True)
    module.prepare()
    assert all(t.is_meta for t in module.state_dict().values())
    module.to_empty(device="cpu")
    filled, weight = quantized(SPECS["nvfp4"], bias=True)
    module.load_state_dict(filled.state_dict())
    assert torch.equal(module.dense_weight(torch.float64), weight.float().double())


@pytest.mark.parametrize(
    ("spec", "sizes", "mistake"),
    [
        (PackedFloat(group_size=48), (128, 64), "group_size: 128 inputs do not divide into groups of 48"),
        (PackedFloat(group_size=0), (128, 64), "group_size: 128 inputs do not divide into groups of 0"),
        (PackedFloat(element="e3m2"), (126, 64), "element: 126 inputs of 6 bits do not fill whole bytes"),
        (PackedFloat(element="e2m1"), (63, 64), "element: 63 inputs of 4 bits do not fill whole bytes"),
        (PackedFloat(group_outputs=0), (128, 64), "group_outputs: must be at least 1, got 0"),
        (PackedFloat(inputs=FloatInputs(group_size=0)), (128, 64), "inputs.group_size: must be at least 1, got 0"),
        (PackedFloat(inputs=FloatInputs(scale=None)), (128, 64), "inputs.scale: without scales of their own all inputs share"),
    ],
)
def test_mistakes_are_named(spec: PackedFloat, sizes: tuple[int, int], mistake: str) -> None:
    found = check(spec, *sizes, False)
    assert len(found) == 1
    assert found[0].startswith(mistake)


def test_other_mistakes() -> None:
    with pytest.raises(SpecError, match="element"):
        load(Linear, {"name": "packed_float", "element": "e1m2"})
    with pytest.raises(ValueError, match=r"scaled_mm needs E4M3 inputs .*; leave matmul out"):
        quantized(with_matmul(SPECS["fp8 channel"], "scaled_mm"))
    with pytest.raises(ValueError, match="scaled_mm needs E4M3 weights"):
        quantized(with_matmul(SPECS["e5m2 channel, token"], "scaled_mm"))


def test_specs_survive_dumping() -> None:
    for spec in SPECS.values():
        for matmul in (None, *(load(FloatMatmul, name) for name in NAMES)):
            full = replace(spec, matmul=matmul)
            assert load(Linear, dump(full)) == full
