"""Prediction of several tokens ahead equals its formulas, written out token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.components.draw import draw, randomise
from zoo.components.contracts import NoCache, Step
from zoo.components.spec import check, dump, load
from zoo.model import ModelSpec
from zoo.multi_token import Chained, Parallel

M, V, T = 16, 30, 8
LAYER = {
    "mixer": {"projection": {"name": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 8}, "position": "rope"},
    "mlp": {"name": "gated", "hidden": 12},
}
DATA = {"width": M, "context": 64, "embed": {"name": "tokens", "vocab": V}, "layers": [LAYER] * 2, "head": {"name": "lm", "tied": True}}
MODEL = randomise(load(ModelSpec, DATA).build()).eval()
IDS = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(1))


def chained(**options: Any) -> Any:
    return randomise(load(Chained, {"layers": [LAYER] * 3, **options}).build(M, 2)).eval()


@pytest.mark.parametrize("kind", [Chained, Parallel])
def test_specs_round_trip_and_name_their_tensors(kind: Any) -> None:
    spec = load(kind, {"layers": [LAYER] * 3})
    assert load(kind, dump(spec)) == spec
    assert not check(spec, M, 2)
    assert {n: t.shape for n, t in spec.tensors(M, 2).items()} == {n: t.shape for n, t in spec.build(M, 2).state_dict().items()}
    assert check(load(kind, {"layers": []}), M, 2)[0].startswith("layers: there is at least one")


def by_the_paper(module: Any, hidden: Tensor, row: Tensor, hidden_first: bool) -> list[Tensor]:
    """Equations 21 to 23 for one row: sequences get shorter with each depth."""
    out = []
    for k, depth in enumerate(module.depths, 1):
        embedded = MODEL.get_submodule("embed").weight[row[k:]]
        a, b = depth.hidden_norm(hidden[:-1]), depth.embed_norm(embedded)
        mixed = torch.cat([a, b] if hidden_first else [b, a], -1) @ depth.project.weight.T
        hidden = depth.norm(depth.layer(mixed[None], Step.plain(0, 1, len(mixed)), NoCache())[0])
        out.append(MODEL.head(hidden))
    return out


@pytest.mark.parametrize("order", ["embedding_first", "hidden_first"])
@torch.no_grad()
def test_chained_equals_deepseek_v3(order: str) -> None:
    module, step = chained(order=order), MODEL.step(IDS)
    hidden = MODEL.hidden(IDS, step, NoCache())
    got = module(hidden, IDS, step, MODEL.embed, MODEL.head)
    assert got.shape == (2, T, 3, V)
    for row in range(2):
        for k, want in enumerate(by_the_paper(module, hidden[row], IDS[row], order == "hidden_first"), 1):
            torch.testing.assert_close(got[row, : T - k, k - 1], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_equal_each_row_alone(side: str) -> None:
    module, n = chained(), 5
    pos, place = torch.arange(T).repeat(2, 1), slice(T - n, T) if side == "left" else slice(0, n)
    pos[1] = -1
    pos[1, place] = torch.arange(n)
    step = Step.of(pos)
    got = module(MODEL.hidden(IDS, step, NoCache()), IDS, step, MODEL.embed, MODEL.head)[1, place]
    alone, own = IDS[1:, place], Step.plain(0, 1, n)
    want = module(MODEL.hidden(alone, own, NoCache()), alone, own, MODEL.embed, MODEL.head)[0]
    for k in range(1, 4):
        torch.testing.assert_close(got[: n - k, k - 1], want[: n - k, k - 1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_depth_k_looks_at_k_tokens_more_and_no_further() -> None:
    module, changed, step = chained(), IDS.clone(), MODEL.step(IDS)
    changed[:, 5] = (changed[:, 5] + 1) % V
    before, after = (module(MODEL.hidden(x, step, NoCache()), x, step, MODEL.embed, MODEL.head) for x in (IDS, changed))
    for k in range(1, 4):
        moved = (before[:, : T - k, k - 1] - after[:, : T - k, k - 1]).abs().amax((0, 2)) > 1e-6
        assert moved.tolist() == [column + k >= 5 for column in range(T - k)]


@torch.no_grad()
def test_parallel_heads_equal_meta() -> None:
    module, step, z = randomise(load(Parallel, {"layers": [LAYER] * 4}).build(M, 2)).eval(), MODEL.step(IDS), draw(2, T, M)
    got = module(z, step, MODEL.head)
    assert got.shape == (2, T, 4, V)
    for k, layer in enumerate(module.layers):
        torch.testing.assert_close(got[:, :, k], MODEL.head(module.norm(layer(z, step, NoCache()))))


def test_all_of_it_learns() -> None:
    module, step = chained(), MODEL.step(IDS)
    module(MODEL.hidden(IDS, step, NoCache()), IDS, step, MODEL.embed, MODEL.head)[:, : T - 3].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
