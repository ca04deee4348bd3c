"""Heads that make one vector of a row: of which tokens, and through what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.components.draw import draw, randomise
from zoo.components.contracts import Embed, Head, Step
from zoo.components.spec import check, load

M, V = 32, 50
TOKENS, IMAGES = load(Embed, {"name": "tokens", "vocab": V}), load(Embed, {"name": "patches", "patch": 4})
PADDED = torch.tensor([[-1, -1, 0, 1, 2], [0, 1, 2, 3, -1], [-1] * 5])


def head(name: str, embed: Any = TOKENS, **options: Any) -> Any:
    return randomise(load(Head, {"name": name, **options}).build(M, embed)).eval()


@torch.no_grad()
def test_the_first_and_the_mean_end_to_end() -> None:
    """The first is not one of those that are skipped."""
    x = draw(3, 5, M)
    x[PADDED < 0] = float("nan")
    got = head("pooling", pool="first_mean", skip=2).pool(x, Step.of(PADDED))
    torch.testing.assert_close(got[0], torch.cat([x[0, 2], x[0, 4]]))
    torch.testing.assert_close(got[1], torch.cat([x[1, 0], x[1, 2:4].mean(0)]))
    assert (got[2] == 0).all()
    assert head("classification", labels=3, pool="first_mean")(got).shape == (3, 3)


def test_pooling_at_a_token() -> None:
    """The first of its kind that is not padding; a row without one gives 0."""
    x, module = draw(3, 5, M), head("pooling", pool="first", only=7)
    step = Step.of(PADDED)
    with pytest.raises(ValueError, match="needs the ids"):
        module.pool(x, step)
    step.inputs = torch.tensor([[7, 7, 3, 7, 7], [1, 2, 3, 4, 7], [7] * 5])
    got = module.pool(x, step)
    torch.testing.assert_close(got[0], x[0, 3])
    assert (got[1:] == 0).all()


@torch.no_grad()
def test_projection_comes_before_the_length() -> None:
    module, x = head("pooling", project=5, bias=True, activation="tanh", normalize=True), draw(4, M)
    want = F.normalize(torch.tanh(x @ module.out.weight.T + module.out.bias), dim=-1)
    torch.testing.assert_close(module(x), want)


@torch.no_grad()
def test_attention_pooling_leaves_padding_out() -> None:
    options = {"heads": 4, "head_dim": 6, "mlp": {"name": "plain", "hidden": 24}}
    module, x = head("attention_pooling", IMAGES, **options), draw(3, 5, M)
    got = module(module.pool(x, Step.of(PADDED)))
    assert torch.isfinite(got).all()
    for row, keep in ((0, slice(2, 5)), (1, slice(0, 4))):
        alone = x[row : row + 1, keep]
        torch.testing.assert_close(got[row], module(module.pool(alone, Step.plain(0, 1, alone.shape[1])))[0])


@torch.no_grad()
def test_two_classifiers_count_as_one() -> None:
    module, x = head("distilled", IMAGES, labels=3), draw(2, 4, M)
    got = module(module.pool(x, Step.plain(0, 2, 4)))
    torch.testing.assert_close(got, (module.out(x[:, 0]) + module.taught(x[:, 1])) / 2)


@pytest.mark.parametrize(("options", "wrong"), [
    ({"name": "pooling", "skip": -1}, "skip: must not be negative, got -1"),
    ({"name": "pooling", "project": 0}, "project: must be at least 1, got 0"),
    ({"name": "pooling", "activation": "tanh"}, "project: bias and activation belong to the projection, of which there is none"),
    ({"name": "pooling", "only": 50}, "only: must be one of the embedding's 50 token ids, got 50"),
    ({"name": "classification", "labels": 3, "dense_width": 4},
     "dense_width: is the width of a dense layer, at least 1; got 4 with dense None"),
    ({"name": "distilled", "labels": 0}, "labels: must be at least 1, got 0"),
])  # fmt: skip
def test_mistakes_are_named(options: dict[str, Any], wrong: str) -> None:
    assert check(load(Head, options), M, TOKENS) == [wrong]


def test_images_have_no_token_to_pool_at() -> None:
    spec = load(Head, {"name": "pooling", "only": 3})
    assert check(spec, M, IMAGES) == ["only: must be one of the embedding's 0 token ids, got 3"]
