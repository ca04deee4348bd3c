"""Dense feed-forward parts equal their formulas and those of transformers."""

from __future__ import annotations

import typing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron.modeling_nemotron import NemotronMLP
from transformers.models.phi.modeling_phi import PhiMLP

from tests.components.draw import draw, randomise
from zoo.components.contracts import MLP
from zoo.components.ops.activation import ACTIVATIONS, Activation
from zoo.components.spec import check, load

WIDTH, HIDDEN = 16, 24
THEIRS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "gelu_sigmoid": "quick_gelu", "relu": "relu",
          "relu_squared": "relu2", "sigmoid": "sigmoid", "tanh": "tanh", "identity": "linear"}  # fmt: skip


def mlp(name: str, **options: Any) -> Any:
    return randomise(load(MLP, {"name": name, "hidden": HIDDEN, **options}).build(WIDTH))


def affine(x: Tensor, linear: Any) -> Tensor:
    y = x @ linear.weight.T
    return y if linear.bias is None else y + linear.bias


def test_every_activation_has_a_name_and_the_other_way_round() -> None:
    assert set(typing.get_args(Activation)) == set(ACTIVATIONS) == set(THEIRS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_transformers(name: str) -> None:
    x = torch.cat([draw(200) * 4, torch.tensor([0.0, -50.0, 50.0])])
    torch.testing.assert_close(ACTIVATIONS[name](x), ACT2FN[THEIRS[name]](x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@torch.no_grad()
def test_formulas(activation: Any, bias: bool) -> None:
    x, act = draw(2, 3, WIDTH), ACTIVATIONS[activation]
    plain, gated = mlp("plain", activation=activation, bias=bias), mlp("gated", activation=activation, bias=bias)
    assert (plain.up.bias is not None) == (gated.gate.bias is not None) == bias
    torch.testing.assert_close(plain(x), affine(act(affine(x, plain.up)), plain.down))
    torch.testing.assert_close(gated(x), affine(act(affine(x, gated.gate)) * affine(x, gated.up), gated.down))


@torch.no_grad()
def test_glu_equals_pytorch() -> None:
    module, x = mlp("gated", activation="sigmoid"), draw(3, WIDTH)
    want = torch.nn.functional.glu(torch.cat([module.up(x), module.gate(x)], -1))
    torch.testing.assert_close(module(x), module.down(want))


@pytest.mark.parametrize(("theirs", "activation", "bias", "names"), [
    (NemotronMLP, "relu_squared", False, ("up_proj", "down_proj")),
    (PhiMLP, "gelu_tanh", True, ("fc1", "fc2")),
])  # fmt: skip
@torch.no_grad()
def test_plain_equals_transformers(theirs: Any, activation: str, bias: bool, names: tuple[str, str]) -> None:
    config = SimpleNamespace(hidden_size=WIDTH, intermediate_size=HIDDEN, hidden_act=THEIRS[activation], mlp_bias=bias)
    ours, other, x = mlp("plain", activation=activation, bias=bias), theirs(config), draw(2, 3, WIDTH)
    for mine, name in zip((ours.up, ours.down), names, strict=True):
        getattr(other, name).load_state_dict(mine.state_dict())
    torch.testing.assert_close(ours(x), other(x))


@torch.no_grad()
def test_clamped_equals_gpt_oss() -> None:
    """One expert that takes all; inputs so large that both clamps act."""
    config = SimpleNamespace(intermediate_size=HIDDEN, num_local_experts=1, hidden_size=WIDTH, swiglu_alpha=1.702, swiglu_limit=7.0,
                             _experts_implementation="eager")  # fmt: skip
    ours, theirs, x = mlp("clamped"), GptOssExperts(config), draw(5, WIDTH) * 3
    pairs = torch.stack([ours.gate.weight.T, ours.up.weight.T], -1).flatten(-2)
    theirs.gate_up_proj.copy_(pairs[None])
    theirs.gate_up_proj_bias.copy_(torch.stack([ours.gate.bias, ours.up.bias], -1).flatten()[None])
    theirs.down_proj.copy_(ours.down.weight.T[None])
    theirs.down_proj_bias.copy_(ours.down.bias[None])
    assert (ours.gate(x) > 7).any()
    assert (ours.up(x) < -7).any()
    want = theirs(x, torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1))
    torch.testing.assert_close(ours(x), want, rtol=1e-5, atol=1e-4)


def test_mistakes_are_named() -> None:
    assert check(load(MLP, {"name": "plain", "hidden": 0}), WIDTH) == ["hidden: must be at least 1, got 0"]
