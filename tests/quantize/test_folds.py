"""Folds: scales and rotations change weights of every family, and not what the model computes."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.quantize.families import CONFIGS, family_model, tokens
from tests.zoo.oracle import relative_error
from zoo.quantize.flow import folds, siblings
from zoo.quantize.scaling import apply_scale
from zoo.quantize.transforms.rotation import Rotation
from zoo.quantize.turning import Turner, refuses

SAME = 2e-5  # relative: norms compute in float32
ALL = {"norm", "value", "up"}
KINDS = {"gpt2": {"norm", "value"}, "gpt_oss": {"norm", "value"}, "olmo2": {"value", "up"}, "bloom": {"norm", "value"}}


@pytest.mark.parametrize("name", CONFIGS)
def test_scaled_channels_leave_the_logits(name: str) -> None:
    model = family_model(name)
    x = tokens()
    expected = model(x)
    found, refused = folds(model.spec)
    assert {fold.kind for fold in found if fold.source != "norm"} == KINDS.get(name, ALL)
    assert bool(refused) == (KINDS.get(name, ALL) != ALL or name == "qwen3_next")
    generator = torch.Generator().manual_seed(0)
    for fold in found:
        before = copy.deepcopy(model.get_submodule(fold.source).state_dict())
        scale = torch.rand(fold.channels.groups * fold.channels.width, generator=generator) * 1.5 + 0.5
        assert apply_scale(model, fold, scale)
        after = model.get_submodule(fold.source).state_dict()
        assert all(not torch.equal(before[n], after[n]) for n in before)
        assert relative_error(model(x), expected) < SAME, fold


ROTATED = ("llama", "qwen2", "gemma", "phi3", "mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_next")


@pytest.mark.parametrize(
    ("name", "transform"),
    [(name, Rotation()) for name in ROTATED]
    + [(name, transform) for name in ("qwen2", "deepseek_v3") for transform in (Rotation(block=8, seed=3), Rotation(residual=False))],
    ids=str,
)
@torch.no_grad()
def test_rotations_leave_the_logits(name: str, transform: Rotation) -> None:
    model = family_model(name)
    x = tokens()
    expected, before = model(x), copy.deepcopy(model.state_dict())
    assert not list(refuses(model.spec))
    turner = Turner(model, transform)
    turner.begin()
    for i in range(len(model.layers)):
        turner.layer(i)
    turner.head()
    assert relative_error(model(x), expected) < SAME
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert ("embed.weight" in changed) == transform.residual
    assert all(any(n.startswith(f"layers.{i}.mixer") for n in changed) for i in range(2) if name != "qwen3_next" or transform.residual)
    if transform.residual:
        assert not model.spec.head.tie()
        assert model.head.out.weight.data_ptr() != model.embed.weight.data_ptr()
        model.spec.build().load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gpt2", "embed: tokens adds positions"), ("gemma2", "wiring: sandwich"), ("olmo2", "wiring: output_norm"), ("cohere2", "norm layer"),
     ("bloom", "norm layer")],
)  # fmt: skip
def test_rotations_that_cannot_be_folded_say_why(name: str, reason: str) -> None:
    assert any(reason in line for line in refuses(family_model(name).spec))


def test_scales_of_value_heads_are_shared_by_their_query_heads() -> None:
    model = family_model("llama")
    fold = next(fold for fold in folds(model.spec)[0] if fold.kind == "value")
    old = model.layers[0].mixer.projection.o.weight.clone()
    apply_scale(model, fold, torch.arange(1.0, 17.0))
    ratio = (model.layers[0].mixer.projection.o.weight / old)[0].view(4, 8)
    assert torch.allclose(ratio[0], ratio[1])
    assert torch.allclose(ratio[2], torch.arange(9.0, 17.0, dtype=torch.float64))


def test_a_scale_beyond_the_dtype_changes_nothing() -> None:
    model = family_model("llama").to(torch.float16)
    before = copy.deepcopy(model.state_dict())
    fold = folds(model.spec)[0][0]
    assert not apply_scale(model, fold, torch.full((32,), 1e6))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama", [("q", "k", "v"), ("gate", "up")]), ("deepseek_v3", [("q_down", "kv_down"), ("gate", "up")]), ("gpt2", [("q", "k", "v")])],
)
def test_fused_modules(name: str, expected: list[tuple[str, ...]]) -> None:
    layer = family_model(name).spec.layers[0]
    assert [tuple(path.rpartition(".")[2] for path in group) for group in siblings(layer)] == expected


def test_every_expert_has_siblings_of_its_own() -> None:
    groups = siblings(family_model("qwen2_moe").spec.layers[1])
    assert [group[0] for group in groups[1:]] == [*(f"mlp.experts.{i}.gate" for i in range(4)), "mlp.shared.gate"]
