"""Half-quadratic quantization, and the storage of its zero points between the codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.quantize.models import ids, same_bits, small
from zoo.components.contracts import Linear
from zoo.components.linear.offset_int import OffsetInt, OffsetLinear
from zoo.components.spec import SpecError, check, dump, load
from zoo.quantize import quantize, verify
from zoo.quantize.methods.hqq import BETA, GROWTH, HQQ, shrunk
from zoo.quantize.methods.rtn import RTN
from zoo.quantize.rules import quantizer


def weights(heavy: bool, outputs: int = 32, inputs: int = 192) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(outputs, inputs, generator=generator)
    return 0.02 * (normal * torch.rand(outputs, inputs, generator=generator).clamp(min=0.05).rsqrt() if heavy else normal)


def rounded(method: Any, weight: Tensor) -> Tensor:
    module = method.storage.build(weight.shape[1], weight.shape[0], False)
    module.hold(method.quantize(weight, None).tensors)
    return module.dense_weight(torch.float64)


def naive(weight: Tensor, method: HQQ) -> Tensor:
    """The published iteration for one group after the other, keeping the zero point of least error."""
    result, top, size = torch.empty_like(weight), 2**method.bits - 1, method.group_size or weight.shape[1]
    for row in range(len(weight)):
        for start in range(0, weight.shape[1], size):
            w = weight[row, start : start + size]
            scale = ((w.max().clamp(min=0) - w.min().clamp(max=0)) / top).bfloat16().float()
            zero, least, best = (-w.min().clamp(max=0) / scale).half().float(), torch.inf, w
            for step in range(method.iterations + 1):
                codes = (w / scale + zero).round().clamp(0, top)
                error = w - (codes - zero) * scale
                if error.abs().pow(method.norm).sum() < least:
                    least, best = error.abs().pow(method.norm).sum(), (codes - zero) * scale
                beta = BETA * GROWTH**step
                outliers = error.sign() * torch.relu(error.abs() - error.abs().pow(method.norm - 1) / beta)
                zero = (codes - (w - outliers) / scale).mean().half().float()
            result[row, start : start + size] = best
    return result


@pytest.mark.parametrize("method", [HQQ(), HQQ(bits=2, group_size=None), HQQ(bits=3, norm=1.0, iterations=3)], ids=str)
def test_it_is_the_published_iteration(method: HQQ) -> None:
    weight = weights(True, 4)
    torch.testing.assert_close(rounded(method, weight).float(), naive(weight, method), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("heavy", [True, False])
def test_it_errs_less_than_round_to_nearest(bits: Any, heavy: bool) -> None:
    weight = weights(heavy)
    ours, plain, still = (
        float((rounded(m, weight) - weight).abs().pow(0.7).mean())
        for m in (HQQ(bits=bits), RTN(bits=bits, symmetric=False), HQQ(bits=bits, iterations=0))
    )
    share = 0.998 if heavy and bits == 2 else 0.985  # four codes cannot do much about outliers
    assert ours < share * min(still, plain)


def test_zero_points_must_lie_between_codes() -> None:
    """Rounded to whole codes they give back nearly all that was won."""
    weight, storage = weights(False), HQQ(bits=3).storage
    tensors = HQQ(bits=3).quantize(weight, None).tensors
    scale, whole = tensors["scale"].float()[..., None], tensors["zero"].float().round()[..., None]
    groups = weight.unflatten(-1, (-1, 64))
    codes = (groups / scale + whole).round().clamp(0, 7)
    module = storage.build(192, 32, False)
    module.hold(storage.encode(codes.to(torch.uint8).flatten(-2), tensors["scale"], whole[..., 0].half()))
    plain, kept = rounded(RTN(bits=3, symmetric=False), weight), rounded(HQQ(bits=3), weight)
    errors = [(w - weight).abs().pow(0.7).mean() for w in (kept, module.dense_weight(torch.float32), plain)]  # type: ignore[operator]
    assert errors[0] < 0.985 * errors[1]
    assert abs(errors[1] / errors[2] - 1) < 0.015


@pytest.mark.parametrize("group", [32, None])
def test_groups_of_one_value(group: int | None) -> None:
    weight = torch.zeros(4, 64)
    weight[1], weight[2], weight[3] = 0.3, -1e-9, -7.0
    torch.testing.assert_close(rounded(HQQ(group_size=group), weight), weight.double(), rtol=2e-3, atol=0)


def test_the_soft_threshold() -> None:
    """Of |e| - |e| ** (p - 1) / beta: nothing below the threshold, the sign above it, 0 at 0."""
    error = torch.tensor([0.0, 0.1, -0.1, 2.0, -2.0])
    expected = 2 - 2**-0.3 / 10
    torch.testing.assert_close(shrunk(error, 10.0, 0.7), torch.tensor([0.0, 0.0, 0.0, expected, -expected]))
    torch.testing.assert_close(shrunk(error, 10.0, 1.0), torch.tensor([0.0, 0.0, 0.0, 1.9, -1.9]))


def test_mistakes() -> None:
    with pytest.raises(SpecError, match=r"norm: must be above 0 and at most 1, got 2\.0"):
        quantizer("hqq", {"norm": 2.0})
    with pytest.raises(SpecError, match="hqq has no such field"):
        quantizer("hqq", {"symmetric": True})
    assert list(OffsetInt(group_size=48).problems(64, 8, False)) == [("group_size", "64 inputs do not divide into groups of 48")]


# ---- storage -----------------------------------------------------------------------------------------------------------------


def held(storage: OffsetInt, bias: bool = False) -> OffsetLinear:
    generator = torch.Generator().manual_seed(3)
    module = storage.build(64, 24, bias)
    codes = torch.randint(0, 2**storage.bits, (24, 64), generator=generator, dtype=torch.uint8)
    groups = storage.groups(64)
    scale = torch.rand(24, groups, generator=generator).add(0.1).to(storage.dtype)
    module.hold(storage.encode(codes, scale, (torch.rand(24, groups, generator=generator) * 2**storage.bits).half()))
    return module


@pytest.mark.parametrize("storage", [OffsetInt(bits=b, group_size=g) for b in (2, 3, 4, 8) for g in (16, None)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_module_is_its_dense_weight(storage: OffsetInt, bias: bool) -> None:
    module = held(storage, bias)
    assert not check(storage, 64, 24, bias)
    assert load(Linear, dump(storage)) == storage
    infos = storage.tensors(64, 24, bias)
    assert {n: (tuple(t.shape), str(t.dtype)[6:]) for n, t in module.state_dict().items()} == {
        n: (i.shape, i.dtype or "float32") for n, i in infos.items()
    }
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module(x), torch.nn.functional.linear(x, module.dense_weight(torch.float32), module.bias))


def test_a_cast_leaves_codes_scales_and_zero_points() -> None:
    module = held(OffsetInt(bits=4, group_size=16), bias=True)
    before = {n: t.clone() for n, t in module.state_dict().items() if n != "bias"}
    module.to(torch.bfloat16)
    assert all(torch.equal(module.state_dict()[n], t) for n, t in before.items())
    assert module.bias is not None
    assert module.bias.dtype == torch.bfloat16
    assert torch.equal(module.dense_weight(torch.bfloat16), module.dense_weight(torch.float32).bfloat16())  # rounded once


# ---- models ------------------------------------------------------------------------------------------------------------------


def test_a_model_is_saved_and_read_to_the_same_bits(tmp_path: Path) -> None:
    model = small(bias=True)
    report = quantize(model, "hqq", bits=3, group_size=32, progress=False)
    assert all("fallback" not in row.facts for row in report.rows)
    with pytest.raises(ValueError, match="offset_int"):
        zoo.save(model, tmp_path / "x", format="compressed_tensors")
    saved = zoo.save(model, tmp_path / "x", format="native", check=lambda folder: verify(model, folder))
    assert saved.transformers is not None
    again = zoo.load(tmp_path / "x")
    assert again.spec == model.spec
    assert same_bits(again, model)
    assert torch.equal(again(ids()), model(ids()))
    plain = zoo.load(tmp_path / "x", quantized="dequantize")
    torch.testing.assert_close(plain(ids()), model(ids()), rtol=1e-5, atol=1e-5)


def test_a_real_model_loses_less_than_by_rounding(shared_data: Path) -> None:
    losses = {}
    for method, options in (("hqq", {}), ("rtn", {"symmetric": False})):
        model = zoo.load(shared_data / "weights/stories260K")
        assert model.source is not None
        text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
        tokens = model.source.tokenizer(text, return_tensors="pt")["input_ids"]
        quantize(model, method, bits=2, group_size=32, rules=["*.down=keep"], progress=False, **options)
        losses[method] = float(torch.nn.functional.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]))
    assert losses["hqq"] < losses["rtn"] - 0.5
