"""Routers: those of transformers bit for bit, our own, balance, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.components.moe_blocks import BLOCKS, Block, E, M
from tests.components.small_moe import build, close, every_router, inputs, small
from zoo.components.contracts import Router, Routing
from zoo.components.ops.moe import balance
from zoo.components.router.top_k import TopK
from zoo.components.spec import SpecError, load, override

every_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)


# ---- transformers ------------------------------------------------------------------------------------------------------------


@every_block
@torch.no_grad()
def test_routers_equal_transformers_bit_for_bit(block: Block) -> None:
    theirs: Any = block.theirs()
    ours, x = block.ours(theirs).router, inputs(500)
    got = ours(x)
    out = getattr(theirs, block.gate)(x)
    if block.folder == "llama4":  # scores of all experts, 0 for those that are not chosen
        scores, logits = out
        weights, experts = scores.gather(1, got.experts), got.experts
        assert ((scores > 0).sum(1) == block.router.k).all()  # pyright: ignore[reportAttributeAccessIssue]
    else:
        logits, weights, experts = out
    order, theirs_order = got.experts.argsort(1), experts.argsort(1)  # some of theirs come unsorted
    assert torch.equal(got.logits, logits)
    assert torch.equal(got.experts.gather(1, order), experts.gather(1, theirs_order))
    assert torch.equal(got.weights.gather(1, order), weights.gather(1, theirs_order))


@torch.no_grad()
def test_small_sigmoids_survive_a_large_correction() -> None:
    router: Any = TopK(k=2, score="sigmoid", correction=True).build(M, E)
    router.weight.data.fill_(-18 / M)
    router.correction.fill_(12)
    assert torch.equal(router(torch.ones(1, M)).weights, torch.full((1, 2), 0.5))


@torch.no_grad()
def test_group_scores() -> None:
    """P of 8 experts in 4 groups, 2 kept: the maximum keeps groups 0 and 3, the sum of the best two keeps 1 and 3."""
    scores = torch.tensor([[0.30, 0.01, 0.16, 0.16, 0.02, 0.02, 0.20, 0.13]])
    for top, kept in ((1, {0, 1, 6, 7}), (2, {2, 3, 6, 7})):
        router: Any = TopK(k=4, groups=4, kept_groups=2, group_top=top).build(M, E)
        assert set(router.choose(scores)[0].tolist()) == kept


# ---- routers of their own ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_expert_choice_balances_and_takes_the_best() -> None:
    router: Any = load(Router, {"name": "expert_choice", "capacity": 1.0}).build(M, 4)
    x = inputs(2, 8)
    routing = router(x)
    assert (balance.load(routing) == 2 * 2).all()
    scores = (x @ router.weight.T).softmax(-1)
    for row in range(2):
        for expert in range(4):
            taken = (routing.experts.view(2, 8, 4)[row, :, expert] >= 0).nonzero().flatten()
            assert set(taken.tolist()) == set(scores[row, :, expert].topk(2).indices.tolist())


def test_noise_only_while_training() -> None:
    router: Any = load(Router, "noisy_top_k").build(M, E)
    x = inputs(50)
    assert not torch.equal(router(x).logits, router(x).logits)
    router.eval()
    assert torch.equal(router(x).logits, x @ router.weight.T)


# ---- balance -----------------------------------------------------------------------------------------------------------------


def test_losses_of_a_known_routing() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    x = torch.tensor([[0.5, -1, 0.25, 2], [-0.75, 0.5, 1.5, -0.5]])
    weight = torch.tensor([[0.3, -0.2, 0.1, 0.4], [-0.5, 0.2, 0.3, -0.1], [0.2, 0.6, -0.4, 0.3], [0.1, -0.3, 0.5, 0.2],
                           [-0.2, 0.4, 0.1, -0.6], [0.7, 0.1, -0.2, 0.1], [-0.1, -0.5, 0.2, 0.3], [0.4, 0.3, 0.6, -0.2]])  # fmt: skip
    router: Any = TopK(k=2).build(4, 8)
    router.weight.data = weight
    routing = router(x)
    assert routing.experts.tolist() == [[0, 6], [1, 7]]
    close(routing.weights, torch.tensor([[0.5187412, 0.4812588], [0.5312094, 0.4687906]]), rtol=1e-6)
    assert float(balance.z_loss(routing)) == pytest.approx(6.16763, rel=1e-5)
    assert float(balance.switch_loss(routing)) == pytest.approx(1.1804, abs=1e-4)
    assert 2 * float(balance.switch_loss(routing)) == pytest.approx(float(load_balancing_loss_func((routing.logits,), 8, 2)), rel=1e-6)
    probability = routing.logits.softmax(-1).mean(0)
    assert float(balance.gshard_loss(routing)) == pytest.approx(float(probability[[0, 1]].sum() / 2 / 8), rel=1e-6)


@every_router
def test_padding_does_not_count_in_balance(router: str) -> None:
    module: Any = load(Router, router).build(M, E).eval()
    x, valid = inputs(2, 9), torch.tensor([[True] * 9, [False] * 9])
    padded, alone = module(x, valid), module(x[:1])
    assert torch.equal(balance.load(padded), balance.load(alone))
    for loss in (balance.switch_loss, balance.gshard_loss, balance.z_loss):
        close(loss(padded), loss(alone))
        loss(module(x, valid)).backward()
        assert torch.isfinite(module.weight.grad).all()


def test_uniform_routing_has_the_least_switch_loss() -> None:
    experts = torch.arange(E)[:, None]
    assert float(balance.switch_loss(Routing(torch.ones(E, 1), experts, torch.zeros(E, E)))) == pytest.approx(1)
    peaked = torch.zeros(E, E)
    peaked[:, 0] = 9
    assert float(balance.switch_loss(Routing(torch.ones(E, 1), experts * 0, peaked))) > 7


@torch.no_grad()
def test_updates_of_the_correction_balance_the_load() -> None:
    router: Any = TopK(k=2, score="sigmoid", correction=True).build(M, E)
    x = inputs(400) + 1
    spread = []
    for _ in range(300):
        counts = balance.load(router(x))
        spread.append(float(counts.max() / counts.float().mean()))
        balance.update_correction(router.correction, counts, rate=0.01)
    assert spread[0] > 1.7
    assert spread[-1] < 1.15


def test_routings_are_collected() -> None:
    block = build(small())
    with balance.routings(block) as found:
        block(inputs())
    assert list(found) == ["router"]
    assert found["router"].experts.shape == (21, 2)
    assert not block.router._forward_hooks


# ---- precision and errors ----------------------------------------------------------------------------------------------------


@every_router
@torch.no_grad()
def test_routers_stay_float32(router: str) -> None:
    block = build(small(router=router))
    x = inputs().bfloat16()
    want = block.router(x.float())
    before = {n: t.clone() for n, t in block.router.state_dict().items()}
    for cast in (block.to(torch.bfloat16), block.half(), block.bfloat16().float()):
        for name, tensor in cast.router.state_dict().items():
            assert torch.equal(tensor, before[name])
            assert tensor.dtype == torch.float32
    got = block.bfloat16().router(x)
    assert torch.equal(got.experts, want.experts)
    assert torch.equal(got.weights, want.weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(block.router(x).logits, want.logits)


def test_an_unknown_router_gives_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'top_k'"):
        override(small(), "router=topk")
