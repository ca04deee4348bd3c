"""Norms equal their formulas, PyTorch's norms and, to the bit where casts matter, those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from tests.components.draw import draw, randomise
from zoo.components import registry
from zoo.components.contracts import Norm
from zoo.components.spec import check, load

WIDTH = 24
NAMES = registry.names("norm")


def norm(name: str, **options: Any) -> Any:
    return randomise(load(Norm, {"name": name, **options}).build(WIDTH)).eval()


def small(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return randomise(registry.get("norm", name).small().build(WIDTH)).to(dtype).eval()


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_the_spec_names(name: str) -> None:
    spec = registry.get("norm", name).small()
    assert {n: t.shape for n, t in spec.tensors(WIDTH).items()} == {n: t.shape for n, t in spec.build(WIDTH).state_dict().items()}


@pytest.mark.parametrize("name", NAMES)
def test_fast_path_equals_the_formula_with_gradients(name: str) -> None:
    module, exact = small(name), small(name, torch.float64)
    got, want = [], []
    for m, f, dtype, out in ((module, module.forward, torch.float32, got), (exact, exact.reference, torch.float64, want)):
        x = (3 * draw(2, 5, WIDTH) + 1).to(dtype).requires_grad_()
        y = f(x)
        (y * draw(2, 5, WIDTH, seed=9)).sum().backward()
        out += [y, x.grad, *(p.grad for p in m.parameters())]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_low_precision_error_is_that_of_rounding(name: str) -> None:
    """Inputs with an outlier of 3e4: a reduction in bf16 would lose the other channels."""
    x = draw(4, WIDTH).bfloat16()
    x[:, 3] = 3e4
    module = small(name, torch.bfloat16)
    exact = small(name).to(torch.float64)
    exact.load_state_dict(module.state_dict())
    want = exact.reference(x.double())
    assert ((module(x).double() - want).abs() <= 2**-6 * want.abs() + 2**-7).all()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_strides_and_leading_dimensions_do_not_matter(name: str) -> None:
    x, module = draw(3, WIDTH, 4).transpose(1, 2), small(name)
    torch.testing.assert_close(module(x), module(x.contiguous()))
    torch.testing.assert_close(module(x)[1, 2], module(x[1, 2][None])[0])


def published_rms(kind: type[nn.Module]) -> Callable[[int, float], nn.Module]:
    return lambda width, eps: kind(width, eps=eps)


BITS: dict[str, tuple[dict[str, Any], Any]] = {
    "llama": ({"name": "rms"}, published_rms(LlamaRMSNorm)),
    "gemma": ({"name": "rms", "offset": 1.0, "cast": "after_weight"}, published_rms(GemmaRMSNorm)),
    "olmo2": ({"name": "rms", "cast": "after_weight"}, published_rms(Olmo2RMSNorm)),
    "cohere": ({"name": "layer", "bias": False}, lambda width, eps: CohereLayerNorm(width, eps=eps)),
    "nemotron": ({"name": "layer", "offset": 1.0}, lambda width, eps: NemotronLayerNorm1P(width, eps=eps)),
    "torch": ({"name": "layer"}, lambda width, eps: nn.LayerNorm(width, eps=eps)),
}


def same_values(spec: dict[str, Any], build: Callable[[int, float], nn.Module], dtype: torch.dtype) -> tuple[Any, Any]:
    """Ours and theirs with the same random values; weights like 15.8125, to which 1 cannot be added in bf16."""
    ours, theirs = load(Norm, {**spec, "eps": 3e-3}).build(WIDTH).to(dtype), build(WIDTH, 3e-3).to(dtype)
    with torch.no_grad():
        for i, p in enumerate(theirs.parameters()):
            p.copy_(draw(WIDTH, seed=i) * 4)
            p[:3] = torch.tensor([15.8125, -0.99609375, 0.0029])
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("model", ["llama", "gemma", "olmo2", "torch"])
@torch.no_grad()
def test_bf16_equals_transformers_to_the_bit(model: str) -> None:
    ours, theirs = same_values(*BITS[model], torch.bfloat16)
    x = (draw(64, WIDTH) * 30).bfloat16()
    assert torch.equal(ours(x), theirs(x))


@torch.no_grad()
def test_bf16_equals_cohere_but_for_the_order_of_summation() -> None:
    ours, theirs = same_values(*BITS["cohere"], torch.bfloat16)
    x = (draw(64, WIDTH) * 30).bfloat16()
    torch.testing.assert_close(ours(x), theirs(x), rtol=2**-7, atol=1e-6)
    assert (ours(x) == theirs(x)).float().mean() > 0.98


@pytest.mark.parametrize("options", [{"name": "rms", "cast": "after_weight"}, {"name": "layer"}], ids=["rms", "layer"])
@torch.no_grad()
def test_the_offset_is_added_in_fp32(options: dict[str, Any]) -> None:
    """transformers' Nemotron norm adds it in bf16, where 1 + 0.0029 is 1."""
    module, exact = (norm(**options, offset=1.0) for _ in range(2))
    module.to(torch.bfloat16).weight.copy_(draw(WIDTH) / 300)
    exact.load_state_dict(module.state_dict())
    x = draw(64, WIDTH).bfloat16()
    assert (module(x) == exact(x.float()).bfloat16()).float().mean() > 0.99


@pytest.mark.parametrize("model", BITS)
@torch.no_grad()
def test_fp32_equals_transformers(model: str) -> None:
    ours, theirs = same_values(*BITS[model], torch.float32)
    x = draw(64, WIDTH) * 30
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_two_casts_differ() -> None:
    """So the comparisons above can tell them apart."""
    x, weight = (draw(64, WIDTH) * 30).bfloat16(), draw(WIDTH, seed=2).bfloat16()
    early, late = (norm("rms", cast=cast).to(torch.bfloat16) for cast in ("before_weight", "after_weight"))
    early.weight.copy_(weight)
    late.weight.copy_(weight)
    assert not torch.equal(early(x), late(x))


@torch.no_grad()
def test_group_equals_pytorch() -> None:
    ours, theirs = norm("group", groups=4, eps=1e-3), nn.GroupNorm(4, WIDTH, eps=1e-3)
    theirs.load_state_dict(ours.state_dict())
    x = draw(6, WIDTH)
    torch.testing.assert_close(ours(x.view(2, 3, WIDTH)).view(6, WIDTH), theirs(x))


@torch.no_grad()
def test_group_of_a_size_is_a_layer_norm_for_each_run() -> None:
    ours = norm("group", size=6, eps=1e-3, bias=False)
    assert list(ours.state_dict()) == ["weight"]
    ours.weight.copy_(draw(WIDTH, seed=3))
    x, runs = draw(5, WIDTH), range(0, WIDTH, 6)
    want = [nn.functional.layer_norm(x[:, i : i + 6], (6,), ours.weight[i : i + 6], None, 1e-3) for i in runs]
    torch.testing.assert_close(ours(x), torch.cat(want, -1))
    torch.testing.assert_close(ours.reference(x), torch.cat(want, -1))


def test_batch_equals_pytorch_in_training_and_after() -> None:
    ours, theirs = norm("batch", eps=1e-3, momentum=0.3).train(), nn.BatchNorm1d(WIDTH, eps=1e-3, momentum=0.3).train()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    for seed in range(3):
        x = draw(2, 5, WIDTH, seed=seed) * 2 + 1
        torch.testing.assert_close(ours(x), theirs(x.transpose(1, 2)).transpose(1, 2))
        torch.testing.assert_close(ours(x), ours.reference(x))
        theirs(x.transpose(1, 2))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    x = draw(2, 5, WIDTH, seed=7)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x.transpose(1, 2)).transpose(1, 2))


@torch.no_grad()
def test_dynamic_tanh_by_hand() -> None:
    module = norm("dynamic_tanh")
    module.alpha.fill_(0.25)
    x = torch.full((1, WIDTH), 2.0)
    want: Tensor = module.weight * 0.46211715726 + module.bias
    torch.testing.assert_close(module(x)[0], want)


def test_groups_must_divide_the_width() -> None:
    assert check(load(Norm, {"name": "group", "groups": 5}), WIDTH) == ["groups: must divide the width 24, got 5"]
    assert check(load(Norm, {"name": "group", "size": 7}), WIDTH) == ["size: must divide the width 24, got 7"]
    assert check(load(Norm, {"name": "group"}), WIDTH) == ["groups: give either groups or size"]
