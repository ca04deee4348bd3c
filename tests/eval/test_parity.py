"""The module that differs first is named."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.eval.made import Pair
from zoo.eval import first_difference
from zoo.eval.parity import activation_differences, llama_names

IDS = torch.arange(3, 43).reshape(2, 20)


def test_equal_models_have_no_difference(pair: Pair) -> None:
    names = llama_names(len(pair.ours.layers))
    found = activation_differences(pair.ours, pair.theirs, IDS, names)
    assert [d.module for d in found] == sorted(names, key=[d.module for d in found].index)
    assert len(found) == len(names)
    assert first_difference(pair.ours, pair.theirs, IDS, names) is None


@pytest.mark.parametrize(
    ("weight", "first"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "layers.1.mixer"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp"),
        ("model.norm.weight", "norm"),
    ],
)
def test_the_first_module_that_differs_is_named(tiny: Pair, weight: str, first: str) -> None:
    changed = copy.deepcopy(tiny.theirs)
    changed.get_parameter(weight).data[0] *= 1.1
    found = first_difference(tiny.ours, changed, IDS, llama_names(2))
    assert found is not None
    assert found.module == first
    assert found.largest > 1e-4


def test_what_is_not_a_number_differs(tiny: Pair) -> None:
    changed = copy.deepcopy(tiny.theirs)
    changed.model.layers[0].mlp.up_proj.weight.data[0] = float("nan")
    found = first_difference(tiny.ours, changed, IDS, llama_names(2))
    assert found is not None
    assert found.module == "layers.0.mlp"


def test_no_hooks_remain(tiny: Pair) -> None:
    first_difference(tiny.ours, tiny.theirs, IDS, llama_names(2))
    assert not any(m._forward_hooks for m in [*tiny.ours.modules(), *tiny.theirs.modules()])


def test_names_that_are_no_modules_are_errors(tiny: Pair) -> None:
    with pytest.raises(AttributeError, match="blocks"):
        first_difference(tiny.ours, tiny.theirs, IDS, {"blocks.0": "model.layers.0"})
